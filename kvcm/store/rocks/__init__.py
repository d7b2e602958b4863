"""The embedded store: one RocksDB in the data directory makes durable what the process keeps in memory."""

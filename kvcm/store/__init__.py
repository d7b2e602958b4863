"""Where metadata is kept: memory, RocksDB, Redis or Valkey. What index and registry share: clients, documents."""

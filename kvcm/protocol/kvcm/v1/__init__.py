"""Our own additions to the wire contract, generated; never edited."""

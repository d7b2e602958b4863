"""Package kvcm of the wire contract, generated; never edited."""

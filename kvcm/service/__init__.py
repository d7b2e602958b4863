"""gRPC, REST, auth, limits, access log: thin translation, no decisions."""

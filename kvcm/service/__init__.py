"""gRPC, REST, authentication, admission, limits, metrics, access log: thin translation, no decisions of the cache."""

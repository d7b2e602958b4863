"""CacheManager: match, write sessions, read leases, location selection, removal."""

"""Values that every room shares: keys, locations, uris, instances, groups, storages, errors."""

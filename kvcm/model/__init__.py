"""Values that all packages share: keys, locations, uris, instances, groups, storages, errors."""

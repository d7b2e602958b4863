"""What operators configure: storages, instance groups, instances, accounts; and who leads."""

"""The configuration of a deployment (storages, instance groups, instances, accounts) and the leader election."""

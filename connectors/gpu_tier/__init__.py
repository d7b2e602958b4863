"""Brings KV between storages and the host pool of the GPU tier; a page of the pool is a block.

`ManagerConnector` is what the tier takes (`kvcm.gpu_tier.connector.KVConnector`). It is the only room of the
connectors that knows the tier, and works without torch: it sees pieces of host memory and names of specs.
"""

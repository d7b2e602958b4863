"""Brings KV between storages and the host pool of the GPU tier; a page of the pool is a block.

`ManagerConnector` implements the tier's Protocol (`kvcm.gpu_tier.connector.KVConnector`). This package alone knows both
the tier and the connectors, and works without torch: it sees pieces of host memory and names of specs.
"""

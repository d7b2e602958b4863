"""Resources under /v1: the calls of the interface, as operators' tools expect them of HTTP."""

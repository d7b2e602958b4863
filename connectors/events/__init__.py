"""`kvcm-subscriber`: reads the KV events of engines, and reports the blocks in their memory to managers.

`subscriber` is the process. For every rank of an engine there is an `EventStream` (`stream`), which puts the messages
of a ZMQ socket in order; `blocks`, which keeps the rank's current set of blocks under our keys; and for every manager
a `Reporter` (`reporter`), which has a report stream of its own.
"""

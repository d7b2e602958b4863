"""Loops over whole traces, one file per family of policies; `kvcm.optimizer.replay.reference` defines what they find.

Every kernel takes the requests, the capacity, the mode, and two columns that it fills: the leading resident blocks of
each request and the blocks resident after it. It returns the accesses to a resident block that are read.
"""

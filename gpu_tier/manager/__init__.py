"""Residency: which KV is on the device, and how the rest gets there in time."""

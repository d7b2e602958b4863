"""Memory of the tier: pages on the device, pages on the host, and their owners."""

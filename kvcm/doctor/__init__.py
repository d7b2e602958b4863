"""What `kvcm doctor` looks at: settings, files, ports, certificates, the shared store, a running manager.

A check is a small function from what is known to findings; what asks the world for it stands beside it.
"""

__all__: list[str] = []

"""The checks of `kvcm doctor`: settings, files, ports, certificates, the shared store, a running manager.

A check is a small function from facts to findings; the function that gathers the facts stands beside it.
"""

__all__: list[str] = []

"""KVCM: the KV-cache manager that lets every engine of a cluster reuse the KV that any of them computed."""

__version__ = "0.1.0"

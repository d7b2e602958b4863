"""The shared store: Redis or Valkey, version 7 or later; standalone, behind Sentinel, or as a Cluster."""

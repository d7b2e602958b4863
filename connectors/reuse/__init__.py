"""What every engine's connector needs: who shares, registration, lookups, write sessions, loads, saves, counts.

Engine connectors (`kvcm.connectors.vllm`, `kvcm.connectors.sglang`, `kvcm.connectors.transformers`) are thin over
this room: they know
when an engine wants KV and where it keeps it. This room works with the base install; it never imports an engine.
"""

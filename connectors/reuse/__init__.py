"""The parts of every engine's connector: identity, registration, lookups, write sessions, loads, saves, statistics.

Engine connectors (`kvcm.connectors.vllm`, `kvcm.connectors.sglang`, `kvcm.connectors.transformers`) are thin over this
package: they know when an engine wants KV and where it keeps it. The package works with the base install; it never
imports an engine.
"""

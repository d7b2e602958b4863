"""Scores of the manager in the gRPC interfaces of other gateways: KVIndexer of SGLang's router, llm-d's IndexerService.

Map: `scorer` (listeners, keys, metrics, life), `kv_indexer` and `pod_scores` (the two calls), `manager_scores` (the
client of managers), `settings`. Nothing is stored here: each request is one `Score` of a manager.
"""

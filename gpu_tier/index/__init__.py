"""Representations of keys that need more than a reduction: clusters, codes and the lightning indexer."""

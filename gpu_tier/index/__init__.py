"""Representations of keys that need more than a reduction: the lightning indexer."""

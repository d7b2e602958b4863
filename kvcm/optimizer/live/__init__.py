"""Tuning of a running manager: what it needs, estimated as it runs, and what other settings would have given."""

"""Metrics, logs, events and traces: called from every layer, and importing none of them."""

"""Metrics, logs and events: declared here, called from anywhere, importing none of our rooms."""

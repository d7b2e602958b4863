"""Sparse attention algorithms: what to attend to. One file each; `registry.make` builds one from its settings."""

"""Engines over the coordinator: a driver of layers, small models, and the adapter of Hugging Face models."""

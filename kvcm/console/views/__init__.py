"""What pages show: documents of resources as values for templates, made by pure functions."""

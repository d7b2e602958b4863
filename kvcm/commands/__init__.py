"""The command line, one module per noun. They share `connection`, `options` and `output`."""

__all__: list[str] = []

"""The command line, one module per noun. What they share: `connection`, `options`, `shown`, `completion`."""

__all__: list[str] = []

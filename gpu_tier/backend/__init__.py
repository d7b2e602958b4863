"""How the attention kernel is told what to read."""

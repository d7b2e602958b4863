"""Messages and calls of the wire contract, generated from proto/ by proto/generate.py; never edited."""

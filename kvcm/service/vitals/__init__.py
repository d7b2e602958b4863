"""How the managers of a deployment are, and how that went on: rates of counters, kept in rings."""

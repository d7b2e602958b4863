"""Says what a cache of a given size, policy and tiering would give on a real trace, and what that is worth."""

"""The blocks that lie in engines' own memory: soft state from reports, beside the index of blocks in storages."""

"""MetaIndex: the records of one instance, with sharded locks, read-modify-write and ready-made answers."""

"""Getting space back: the deletion executor; watermarks, eviction policies and garbage collection belong here too."""

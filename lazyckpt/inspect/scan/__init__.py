"""Whether files are safe to load with programs that unpickle or run what is in them."""

"""What the explorer answers: a module for each group of paths, with a dictionary ``ENDPOINTS``."""

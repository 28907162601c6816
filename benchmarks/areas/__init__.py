"""The rows of the suite, one module for each area. Each has an ``AREA``."""

"""Names of one family of models for those of another."""

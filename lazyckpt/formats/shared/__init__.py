"""What several formats need."""

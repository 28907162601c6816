"""A pickle reader that treats pickles as inert data and never calls anything that they name."""

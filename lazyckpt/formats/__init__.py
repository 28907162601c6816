"""One module per family of layouts; each is a function from files to an Index."""

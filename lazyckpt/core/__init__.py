"""The placement algebra and its vocabulary: pure data and arithmetic, no I/O, no checkpoint format."""

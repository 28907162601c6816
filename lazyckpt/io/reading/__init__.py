"""Execution of read plans: from byte ranges of files to tensors."""

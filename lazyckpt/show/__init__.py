"""Text, HTML and plots of views and tensors. Only values, samples and plots of values read tensor data."""

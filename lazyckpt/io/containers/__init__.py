"""Container formats that hold tensors: torch's zips and pickles, safetensors."""

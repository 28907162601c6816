"""Files that hold tensors: zips and pickles of torch, safetensors."""

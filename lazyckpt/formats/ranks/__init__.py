"""Folders of rank files of torch.save, in which tensors are shards: DTensors, ShardedTensors, flat parameters."""

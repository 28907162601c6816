"""`CheckpointView`: a namespace of lazy tensors with the methods that read, write, convert and show a checkpoint.

Each module adds the methods of one kind: `reading` (also statistics and digests), `derived` (views of the same tensors
under other names, in other dtypes, for other ranks, with other layers), `writing`. `checkpoint` has the public class,
with opening and arithmetic. `bases` finds the bases of delta checkpoints.
"""

from .checkpoint import CheckpointView, unshard, view_of, with_wrappers, within

__all__ = ["CheckpointView", "unshard", "view_of", "with_wrappers", "within"]

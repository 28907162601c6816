"""What trainers write around weights: optimizers, schedulers, random states, in files and folders of their own."""

from . import folder, lightning

READERS = (lightning.READER, folder.READER)

__all__ = ["READERS"]

"""What trainers write around weights: optimizers, schedulers, random states, in files and folders of their own."""

from . import lightning, sharding, torchtune
from .folder import READER as FOLDER

READERS = (lightning.READER, sharding.READER, torchtune.READER)

__all__ = ["FOLDER", "READERS"]

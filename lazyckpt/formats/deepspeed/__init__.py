"""DeepSpeed checkpoints. Facts and their sources: deepspeed/runtime/engine.py (file names, model states),
runtime/zero/stage_1_and_2.py and stage3.py (optimizer states)."""

from ..reader import Reader, Source
from .files import find_folder
from .zero import read


def _recognises(source: Source) -> bool:
    return not source.path and find_folder(source, strict=False) is not None


READER = Reader("deepspeed", "DeepSpeed folders (a tag, or the folder with `latest`)", _recognises, read)

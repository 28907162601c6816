"""DeepSpeed checkpoints: ZeRO-0 to 3, BF16_Optimizer, pipelines, tensor parallelism, experts, universal."""

from ..reader import Reader, Source
from .files import find_folder
from .reader import read


def _recognises(source: Source) -> bool:
    return not source.path and find_folder(source, strict=False) is not None


READER = Reader("deepspeed", "DeepSpeed folders (a tag, or the folder with `latest`)", _recognises, read, tags=True)

"""Legacy checkpoints of Megatron-LM and megatron-core: ``iter_0000003/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``."""

from ..reader import Reader, Source
from .files import find_ranks
from .reader import read


def _recognises(source: Source) -> bool:
    return not source.path and find_ranks(source, strict=False) is not None


READER = Reader(
    "megatron",
    "Megatron folders (an iteration, or the folder with `latest_checkpointed_iteration.txt`)",
    _recognises,
    read,
)

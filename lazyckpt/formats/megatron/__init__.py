"""Legacy checkpoints of Megatron-LM and megatron-core: ``iter_0000003/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``."""

from ..reader import Reader
from .files import is_legacy
from .reader import read

READER = Reader(
    "megatron",
    "Megatron folders (an iteration, or the folder with `latest_checkpointed_iteration.txt`)",
    is_legacy,
    read,
)

"""Lightning's sharded checkpoints: torch.distributed.checkpoint, and everything that is not sharded in `meta.pt`.

Writers: lightning/fabric/strategies/fsdp.py and model_parallel.py (the keys of the user's state), and
lightning/pytorch/strategies/fsdp.py and model_parallel.py ("model" or "state_dict", "optimizer_0", ...) with the rest
of a Lightning checkpoint in `meta.pt`. Folders of Lightning's DeepSpeed strategy are read as DeepSpeed's.
"""

from __future__ import annotations

from dataclasses import replace

from ...core.index import Index
from ...errors import LazyckptError, cannot_read
from ...io.containers.pickle.plain import Path
from ..dcp.reader import in_folder
from ..reader import Reader, Source
from ..shared.members import Member, together
from ..torch_save import member

_META = "meta.pt"


def _read(source: Source) -> Index:
    shards = in_folder(source.store)
    members: list[tuple[Path, Member]] = [((), shards)]
    problems = []
    try:
        members.append(((), member(source.store, _META, f"{_META}/")))
    except LazyckptError as e:  # the shards can be read without it
        problems.append(cannot_read(_META, e, ", what it holds is not in view.meta"))
    index = together("lightning", members, _models(shards))
    return replace(index, problems=(*problems, *index.problems))


def _models(shards: Member) -> list[str]:
    """Return the top keys of models: only models and optimizers are sharded, and an optimizer also has param_groups."""
    optimizers = {path[0] for path in shards.objects if len(path) > 1}
    optimizers |= {path[0] for path, _ in shards.tensors.values() if len(path) > 1 and path[1] == "state"}
    tops = dict.fromkeys(str(path[0]) for path, _ in shards.tensors.values() if len(path) > 1)
    return [top for top in tops if top not in optimizers]


def _recognises(source: Source) -> bool:
    return not source.path and ".metadata" in source.entries and _META in source.entries


READER = Reader("lightning", "sharded checkpoints of Lightning (.metadata, *.distcp and meta.pt)", _recognises, _read)

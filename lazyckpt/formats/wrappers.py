"""Names as the model's own, without what wraps it: the modules of data parallelism, compilation and adapters.

Wrappers are modules, so their attribute stands in the names: torch/nn/parallel/distributed.py (`module`),
torch/_dynamo/eval_frame.py `OptimizedModule` (`_orig_mod`), torch/distributed/fsdp/_common_utils.py
`FSDP_WRAPPED_MODULE`, torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py `_CHECKPOINT_PREFIX`,
lightning/fabric/wrappers.py `_FabricModule` (`_forward_module`), peft/peft_model.py (`base_model.model`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..core.index import Index, TensorSpec, renamed

# Nobody else uses these words, so they go wherever they stand; the others could be a model's own, and go only where
# every name begins with them.
_ANYWHERE = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
_LEADING = ("_forward_module.", "base_model.model.", "module.")


def unwrapped(index: Index) -> Index:
    """The index under the model's own names; each tensor keeps the name it is stored under. Unchanged if nothing wraps
    the model, or if two tensors would get one name (that is told)."""
    names = {name for state in index.states.values() for name in state}
    first = next(iter(index.states.values()), {})
    # deepspeed takes its own wrapper off before it saves: there the word is the model's
    own = "module." if index.format.startswith("deepspeed") else ""
    leading = _leading(first or names, own)
    bare = {name: new for name in (*names, *index.aliases, *index.unreadable) if (new := _bare(name, leading)) != name}
    if not bare:
        return index
    states: dict[str, dict[str, TensorSpec]] = {}
    for state, table in index.states.items():
        states[state] = {bare.get(name, name): renamed(spec, bare.get(name, name)) for name, spec in table.items()}
        if len(states[state]) < len(table):
            line = f"two tensors of {state!r} have one name but for what wraps their module: names stay as stored"
            return replace(index, problems=(*index.problems, line))
    return replace(
        index,
        states=states,
        aliases={bare.get(a, a): bare.get(o, o) for a, o in index.aliases.items()},
        unreadable={bare.get(name, name): reason for name, reason in index.unreadable.items()},
    )


def _leading(names: Collection[str] | Mapping[str, TensorSpec], own: str = "") -> str:
    """What all names begin with, of the prefixes that wrappers give, once the words that go anywhere are gone.

    >>> _leading(["module._orig_mod.base_model.model.a", "module.base_model.model.b"])
    'module.base_model.model.'
    """
    left = [_without(name) for name in names]
    found = ""
    while left:
        prefix = next((p for p in _LEADING if p != own and all(n.startswith(p) and len(n) > len(p) for n in left)), "")
        if not prefix:
            break
        found += prefix
        left = [n[len(prefix) :] for n in left]
    return found


def _bare(name: str, leading: str) -> str:
    return _without(name).removeprefix(leading)


def _without(name: str) -> str:
    if not any(word in name for word in _ANYWHERE):
        return name
    return ".".join(part for part in name.split(".") if part not in _ANYWHERE) or name

"""Whether the files of transformers' Trainer are of one step: its state, its scheduler and its optimizer count alike.

transformers/trainer.py `_inner_training_loop` steps the optimizer, then the scheduler, then ``global_step``. With fp16,
a step that the gradients' scaler skips counts in ``global_step`` only, and in old versions for the scheduler, too. The
scaler itself is not saved by versions before pull request 11663 of May 2021, nor by those of 2023 and 2024 (issue
34053): only the arguments tell of fp16. A file that was left by an earlier save, or that was copied late, has another
count than the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ...core.select import Selection
from ...core.specs import TensorSpec
from ...errors import CorruptError, Problem, some
from ...io.containers.pickle.plain import Path
from ...io.reading.gather import read
from ...io.storage.base import Store
from ..shared.members import Member

_MOST = 4  # counters that are read: one differs from the others only if its parameter had no gradient at some steps


def of_another_step(store: Store, members: Sequence[tuple[Path, Member]], state: Any) -> Iterator[Problem]:
    """Yield problems if optimizer.pt, scheduler.pt and trainer_state.json say that they are of different steps.

    ``state`` is what trainer_state.json holds. Reads a few counters of the optimizer, of four bytes each.
    """
    parts = {base[0]: member for base, member in members if len(base) == 1}
    optimizer, scheduler = parts.get("optimizer"), parts.get("scheduler")
    about: Mapping[str, Any] = {} if scheduler is None else scheduler.meta
    if optimizer is not None:
        yield from _rates(optimizer.meta.get("param_groups"), about.get("_last_lr"))
    step = state.get("global_step") if isinstance(state, dict) else None
    last = about.get("last_epoch")
    made = last if type(last) is int and "num_bad_epochs" not in about else None  # (not evaluations of a plateau)
    arguments = training_arguments(members)
    unsaved = "scaler" not in parts and (arguments is None or arguments.get("fp16") is True)
    skips = "scaler" in parts or unsaved
    if type(step) is not int or step <= 0:
        return
    if made is not None and (made > step or (made < step and not skips)):
        line = (
            f"scheduler.pt has made {made:,} steps, and trainer_state.json says step {step:,}: one of the two files "
            "may be of another save"
        )
        yield Problem("step-mismatch", line, "scheduler.pt")
    if optimizer is None:
        return
    right = {float(step), *([] if made is None else [float(made)])}
    found: list[float] = []
    for number in islice(_counters(store, optimizer), _MOST):
        if number in right or (number < step and (unsaved or (skips and made is None))):
            return
        found.append(number)
    if found:
        line = (
            f"the parameters in optimizer.pt have made {max(found):,.0f} steps, and trainer_state.json says step "
            f"{step:,}: one of the two files may be of another save"
        )
        yield Problem("step-mismatch", line, "optimizer.pt")


def training_arguments(members: Sequence[tuple[Path, Member]]) -> Mapping[str, Any] | None:
    """Return the attributes of the Trainer's arguments, without building them; None if there are none."""
    record = next((m.meta["training_args"] for base, m in members if not base and "training_args" in m.meta), None)
    found = getattr(record, "state", None)
    return found if isinstance(found, dict) else None


def _counters(store: Store, optimizer: Member) -> Iterator[float]:
    """Yield how many steps parameters have made: tensors (torch's optimizers), or numbers (bitsandbytes, Adafactor)."""
    states = optimizer.meta.get("state")
    for one in states.values() if isinstance(states, Mapping) else ():
        number = one.get("step") if isinstance(one, Mapping) else None
        if type(number) is int:
            yield float(number)
    for path, spec in optimizer.tensors.values():
        if len(path) == 3 and path[0] == "state" and path[2] == "step" and spec.numel == 1 and spec.fragments:
            number = _value(store, spec)
            if number is not None:
                yield number


def _value(store: Store, spec: TensorSpec) -> float | None:
    try:
        return float(read(store, spec, Selection.all(spec.shape).reads()).item())
    except CorruptError:  # of this tensor alone: reading it says so
        return None


def _rates(groups: Any, last: Any) -> Iterator[Problem]:
    """Yield a problem if the optimizer has other learning rates than its scheduler has set last.

    torch/optim/lr_scheduler.py `LRScheduler.step` sets the rates of all groups, and keeps them in ``_last_lr``. Users
    of accelerate can have several schedulers for one optimizer, the Trainer has one.
    """
    if not (isinstance(groups, list) and isinstance(last, list) and len(groups) == len(last)):
        return
    rates = [group.get("lr") if isinstance(group, dict) else None for group in groups]
    if all(type(rate) is float for rate in (*rates, *last)) and rates != last:
        line = (
            f"the learning rates of optimizer.pt ({some(map(str, rates))}) are not those that scheduler.pt has set "
            f"last ({some(map(str, last))}): one of the two files may be of another step"
        )
        yield Problem("inconsistent-metadata", line, "optimizer.pt")

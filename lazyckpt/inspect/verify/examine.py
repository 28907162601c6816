"""The checks of a checkpoint in order, at three levels."""

from __future__ import annotations

from time import monotonic
from typing import Any, Literal, TypeAlias

from ...jobs.executor import runner
from ...namespace import Namespace
from ..manifest import Digest
from ..report import Finding, Report
from . import agreement, checksums, structure
from .sweep import Swept, Target, sweep
from .values import judged

Level: TypeAlias = Literal["quick", "default", "full"]


def examine(
    view: Namespace[Any],
    level: Level = "default",
    executor: Any = None,
    memory: int | str | None = None,
    progress: bool | None = None,
) -> Report:
    """Return the report about a whole checkpoint. See `lazyckpt.verify`."""
    begun = monotonic()
    store, infos = view._store, view.files
    watched = view._index.pins  # without the thousands of chunks of an array, which are looked at on reading
    states = {state: one.once()[0] for state, one in view.states.items()}
    findings = [Finding.of(problem, infos) for problem in view.problems]
    findings += [
        Finding("missing-tensor", f"{name} cannot be read: {why}", tensor=name) for name, why in view.unreadable.items()
    ]
    targets = [Target(state, name, t) for state, tensors in states.items() for name, t in tensors.items()]
    first = next(iter(states.values()), {})
    findings += structure.shapes(states)
    findings += structure.configuration(store, view.meta, first)
    findings += structure.ages(watched)
    facts: dict[str, Any] = {"format": view.format, "level": level, "files": len(infos), "tensors": len(targets)}
    if level != "quick":
        run = runner(executor, memory)
        recorded, odd = checksums.recorded_sha256(store, list(watched))
        findings += odd
        steps = agreement.steps(states, view.meta)
        findings += agreement.differing_steps(steps)
        archives = structure.archives_of(targets)
        findings += structure.overlaps(archives)
        kept = checksums.of_files(store, list(watched), archives)
        findings += [f for one in kept.values() for f in one.findings]
        swept = sweep(store, targets, {path: one.records for path, one in kept.items() if one.records}, run, progress)
        findings += [checksums.wrong(path, record) for path, record in swept.wrong]
        findings += _unread(swept, targets)
        findings += judged(targets, swept, steps)
        facts["bytes"] = swept.nbytes
        findings += checksums.compare_sha256(store, recorded, run) if recorded else []
        if level == "full":
            findings += agreement.compared(targets, states, run, progress)
    facts["seconds"] = round(monotonic() - begun, 3)
    return Report.of(view.root, "verify", findings, facts)


def _unread(swept: Swept, targets: list[Target]) -> list[Finding]:
    found = []
    for what, (code, why) in swept.errors.items():
        if isinstance(what, str):
            found.append(Finding(code, f"{what} cannot be read: {why}", what))
        else:
            target = targets[what]
            found.append(Finding(code, f"{target.state}: {target.name}: {why}", tensor=target.name))
    return found


def against_manifest(digest: Digest, manifest: Digest) -> list[Finding]:
    """Return a finding for each tensor that is not the one of the manifest."""
    return [
        Finding("digest-mismatch", str(one), tensor=one.name, details={"state": one.state, "kind": one.kind})
        for one in digest.mismatches(manifest)
    ]

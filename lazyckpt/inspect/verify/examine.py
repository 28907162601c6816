"""The checks of a checkpoint in order, at three levels."""

from __future__ import annotations

import re
from collections.abc import Container
from time import monotonic
from typing import Any, Literal, TypeAlias

from ...errors import Problem
from ...io.memory import many_objects
from ...jobs.executor import runner
from ...namespace import Namespace
from ..manifest import Digest
from ..report import Finding, Report
from . import agreement, checksums, structure
from .configuration import configuration, tied
from .identical import copies
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
    with many_objects():
        return _examined(view, level, executor, memory, progress)


def _examined(
    view: Namespace[Any], level: Level, executor: Any, memory: int | str | None, progress: bool | None
) -> Report:
    begun = monotonic()
    store, infos = view._store, view.files
    watched = view._index.pins  # without the thousands of chunks of an array, which are looked at on reading
    states = {state: one.once()[0] for state, one in view.states.items()}
    names = view.specs
    findings = [_problem(problem, infos, names, view.format) for problem in view.problems]
    findings += structure.lost(view.unreadable)
    targets = [Target(state, name, t) for state, tensors in states.items() for name, t in tensors.items()]
    first = next(iter(states.values()), {})
    findings += structure.shapes(states)
    findings += structure.marks(store, view.format, watched)
    findings += structure.step_of_folder(view.root, view.meta)
    findings += structure.total_size(view.meta, first)
    findings += structure.ages(watched)
    findings += configuration(store, view.meta, first)
    recorded, odd = checksums.integrity(store, list(watched))
    findings += odd
    facts: dict[str, Any] = {"format": view.format, "level": level, "files": len(infos), "tensors": len(targets)}
    if level != "quick":
        run = runner(executor, memory)
        recorded = checksums.recorded_sha256(store, list(watched)) | recorded
        archives, packed = structure.archives_of(targets)
        structure.located(store, archives)
        steps = agreement.steps(states, view.meta)
        findings += agreement.differing_steps(steps)
        findings += agreement.differing_ranks(view.format, lambda: view.stored)
        findings += structure.overlaps(archives)
        kept = checksums.of_files(store, list(watched), archives)
        findings += [f for one in kept.values() for f in one.findings]
        records = {path: one.records for path, one in kept.items() if one.records}
        swept = sweep(store, targets, records, run, progress)
        findings += [checksums.wrong(path, record) for path, record in swept.wrong]
        findings += _unread(swept, targets, store.root)
        findings += judged(targets, swept, steps)
        findings += copies(swept, records)
        findings += checksums.compare_packed(store, packed, run) if packed else []
        facts["bytes"] = swept.nbytes
        findings += checksums.compare_sha256(store, recorded, run) if recorded else []
        if level == "full":
            known = {n for n in swept.errors if isinstance(n, int)}
            ties = tied(view.meta, first)
            findings += agreement.compared(targets, states, ties, known, run, progress)
    facts["seconds"] = round(monotonic() - begun, 3)
    return Report.of(view.root, "verify", findings, facts)


def _problem(problem: Problem, files: Container[str], names: Container[str], of: str) -> Finding:
    """Return a problem of the view as a finding."""
    found = Finding.of(problem, files, names)
    if found.code == "duplicate-tensor" and of.startswith("deepspeed"):
        found.severity = "note"  # each stage of a pipeline saves the modules that it shares with others
    return found


def _unread(swept: Swept, targets: list[Target], root: str) -> list[Finding]:
    found = []
    for what, (code, why) in swept.errors.items():
        if isinstance(what, str):
            found.append(Finding(code, f"{what} cannot be read: {why}", what))
        else:
            target = targets[what]
            place = re.search(rf"{re.escape(root.rstrip('/'))}/([^\s:]+)", why)
            file = place[1] if place is not None else None
            found.append(Finding(code, f"{target.state}: {target.name}: {why}", file, target.name))
    for n, (absent, blocks) in swept.absent.items():
        if absent < blocks:
            text = f"{targets[n].name}: {absent:,} of {blocks:,} blocks are in no file and read as the fill value"
            found.append(Finding("absent-chunks", text, tensor=targets[n].name))
    return found


def against_manifest(digest: Digest, manifest: Digest) -> list[Finding]:
    """Return a finding for each tensor that is not the one of the manifest."""
    return [
        Finding("digest-mismatch", str(one), tensor=one.name, details={"state": one.state, "kind": one.kind})
        for one in digest.mismatches(manifest)
    ]

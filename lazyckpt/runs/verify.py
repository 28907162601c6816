"""`lazyckpt.verify`: check a checkpoint, or every checkpoint of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ..core.units import plural
from ..errors import DataError, FormatError, LazyckptError
from ..inspect.manifest import Digest
from ..inspect.report import Finding, Report
from ..inspect.verify.examine import Level, against_manifest, examine
from ..inspect.verify.values import PARAMETERS
from ..io.storage.urls import is_url
from ..view import CheckpointView
from .delta import recorded_digest
from .view import RunView


def verify(
    path: CheckpointView | str | os.PathLike[str],
    *,
    level: Literal["quick", "default", "full"] = "default",
    against: Digest | str | os.PathLike[str] | None = None,
    executor: Any = None,
    memory: int | str | None = None,
    progress: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:
    """Check whether a checkpoint is whole and its values are sane.

    Parameters
    ----------
    path
        A view, or the path or URL of a checkpoint or of a run: of a run, every checkpoint is checked.
    level
        "quick": files, metadata, names and shapes, without reading tensor data. "default": reads each byte once, and
        also checks the checksums that writers left, and the values. "full": also compares replicas, and the fp32
        weights of the optimizer with the 16-bit weights.
    against
        A manifest of `lazyckpt digest`, as an object or as the path of its file: tensors that are not those of the
        manifest are reported. Reads all of its states once more.
    executor, memory, progress
        See `WriteOptions`.
    storage_options
        Options of fsspec's file system for a URL: credentials, endpoints.

    Returns
    -------
    Report
        The findings, the worst first. ``report.ok`` is True if there is no error and no warning.

    Raises
    ------
    DataError
        ``level`` is none of the three.
    LazyckptError
        What `lazyckpt.open` raises; and what `Digest.from_json` raises for the manifest.
    WorkerError
        Workers of the executor died.
    """
    if level not in ("quick", "default", "full"):
        raise DataError(f"level={level!r:.40}: it is quick, default or full")
    manifest = _manifest(against)
    view = path if isinstance(path, CheckpointView) else _opened(path, storage_options)
    if isinstance(view, RunView):
        reports = {}
        for step in view.steps:
            one = view.at(step)
            reports[f"step {step}"] = _checked(one, level, manifest, executor, memory, progress)
        skipped = []
        for problem in view.problems:
            if problem.code != "skipped-checkpoint":
                continue
            try:  # without a step it is no part of the run, but it can be checked
                one = CheckpointView(f"{view.root}/{problem.path}", storage_options=storage_options)
            except LazyckptError:
                skipped.append(problem)
            else:
                reports[str(problem.path)] = _checked(one, level, manifest, executor, memory, progress)
        joined = Report.joined(view.root, reports)
        own = [Finding(problem.code, str(problem), problem.path, severity="error") for problem in skipped]
        lines = joined.facts["checkpoints"] | {str(p.path): "cannot be opened" for p in skipped if p.path}
        return Report.of(view.root, "verify", [*joined.findings, *own], {**joined.facts, "checkpoints": lines})
    report = _checked(view, level, manifest, executor, memory, progress)
    return report if isinstance(path, CheckpointView) else _with_others(report, path)


def _with_others(report: Report, path: str | os.PathLike[str]) -> Report:
    """Return the report of the path as given; of a run with a note that the newest checkpoint was checked."""
    if is_url(os.fspath(path)):
        return report
    path = os.path.expanduser(path)
    if os.path.isfile(path) or os.path.abspath(path) == os.path.abspath(report.path):
        return replace(report, path=os.fspath(path))  # as the user wrote it: the root of a file is its folder
    try:
        count = len(RunView(path).steps)
    except LazyckptError:
        return report
    if count < 2:
        return report
    name = os.path.relpath(report.path, path)
    text = f"{name} was checked, the newest of {count:,} checkpoints; lazyckpt verify --run checks all of them"
    note = Finding("other-checkpoint", text, todo="Use --run, or open_run in Python.")
    return Report.of(report.path, report.tool, [*report.findings, note], report.facts)


def _manifest(against: Digest | str | os.PathLike[str] | None) -> Digest | None:
    if against is None or isinstance(against, Digest):
        return against
    try:
        text = Path(against).expanduser().read_bytes()
    except OSError as e:
        raise DataError(f"{os.fspath(against)}: the manifest cannot be read: {e.strerror or e}") from None
    return Digest.from_json(text)


def _opened(path: str | os.PathLike[str], options: Mapping[str, Any] | None) -> CheckpointView:
    """Return the checkpoint, or the run if the path is none but has several in it."""
    try:
        return CheckpointView(path, storage_options=options)
    except FormatError:
        archive = os.fsdecode(path).lower().endswith((".tar", ".zip"))
        if not (is_url(os.fspath(path)) or archive or Path(path).is_dir()):
            raise
        try:
            run = RunView(path, storage_options=options)
            if run.steps:
                return run
        except LazyckptError:
            pass
        raise  # what opening says is about the path that the user gave


def _checked(
    view: CheckpointView, level: Level, manifest: Digest | None, executor: Any, memory: int | str | None, progress: Any
) -> Report:
    report = examine(view, level, executor, memory, progress)
    if manifest is None and level != "quick":
        manifest = recorded_digest(view)
    if manifest is None:
        return report
    pairs = _paired(manifest, view)
    own = list(dict.fromkeys(pairs.values()))
    states: Mapping[str, Any] = {}
    if own:
        options = {"executor": executor, "memory": memory, "progress": progress}
        states = view.digest(algorithm=manifest.algorithm, states=own, **options).states
    digest = Digest(manifest.algorithm, {theirs: states[ours] for theirs, ours in pairs.items()})
    wanted = Digest(manifest.algorithm, {theirs: manifest.states[theirs] for theirs in pairs})
    lost = [
        Finding(
            "digest-mismatch",
            f"the manifest has {plural(len(table), 'tensor')} of {state}; the checkpoint has no such state",
            severity="warning",
            todo="Nothing to do if it was left out on purpose, as in an export of the weights.",
            details={"state": state, "kind": "only there"},
        )
        for state, table in manifest.states.items()
        if state not in pairs
    ]
    findings = [*report.findings, *against_manifest(digest, wanted), *lost]
    return Report.of(report.path, report.tool, findings, report.facts)


def _paired(manifest: Digest, view: CheckpointView) -> dict[str, str]:
    """Return states of the manifest -> states of the view with the same name. The first state of each, which has the
    weights, is compared also where formats name it differently: "fp32" of ZeRO is "weights" of an export."""
    pairs = {state: state for state in manifest.states if state in view.states}
    first, main = next(iter(manifest.states), ""), next(iter(view.states), "")
    if first in PARAMETERS and main in PARAMETERS and first not in pairs and main not in pairs:
        pairs = {first: main, **pairs}
    return pairs

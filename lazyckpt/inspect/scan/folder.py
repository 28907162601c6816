"""`lazyckpt.scan`: whether a file, or everything in a folder, is safe to load with other programs."""

from __future__ import annotations

import os
import stat
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from time import monotonic
from typing import Any, cast

from ...core.units import plural
from ...errors import DataError, LazyckptError, printable, some
from ...formats.archives import locate
from ...io.containers.pickle.audit import GRADES
from ...io.storage.base import Store
from ...io.storage.local import LocalStore
from ...io.storage.streams import StoreFile
from ..report import Finding, Report
from .blocks import Blocks
from .contents import Contents, examine_file

_FILES_NAMED = 100  # files that the details of a finding name
_TOGETHER = 16  # files behind a network that are examined at a time


def scan(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Report:
    """Tell whether files are safe to load with programs that unpickle them, such as ``torch.load``.

    Every pickle is interpreted without running anything: in every file of the folder, in archives, and in bytes within
    pickles. Each name that a pickle would import is judged: harmless names are those of an allowlist, names that can
    run code are errors, and all others are warnings. Also reported: code beside or within the files, configurations
    that name code, links that leave the folder. The files need not be a checkpoint that lazyckpt can open.

    Parameters
    ----------
    path
        The path or URL of a file, or of a folder with everything below it: a checkpoint, a run, a download.
    storage_options
        Options of fsspec's file system for a URL: credentials, endpoints.

    Returns
    -------
    Report
        The findings, the worst first. ``report.worst`` is "error" if a file is dangerous to load.
        ``report.facts["names"]`` has all names that the pickles import, by grade.

    Raises
    ------
    MissingFileError
        There is no such file or folder.
    DataError
        The URL is a folder that its server does not list.
    """
    begun = monotonic()
    store, name = locate(os.fsdecode(path), storage_options)
    findings: list[Finding] = []
    seen: list[Contents] = []
    with closing(store):
        if name:
            paths: Iterator[str] = iter([name])
        elif isinstance(store, LocalStore):
            paths = _local(store.root, findings)
        else:
            paths = _listed(store, findings)
        count = 0
        for one, found in _examined(store, paths):
            count += 1
            if isinstance(found, LazyckptError):
                findings.append(Finding("not-examined", f"{printable(one)}: {found}", one, severity="warning"))
                continue
            findings += found.findings
            found.findings = []
            if found.names or found.pickles:
                seen.append(found)
    findings = _with_code_named(findings)
    findings += _names(seen)
    facts: dict[str, Any] = {
        "files": count, "pickles": sum(one.pickles for one in seen), "names": _by_grade(seen),
        "seconds": round(monotonic() - begun, 3),
    }  # fmt: skip
    return Report.of(os.fspath(path), "scan", findings, facts)


def _examined(store: Store, paths: Iterator[str]) -> Iterator[tuple[str, Contents | LazyckptError]]:
    """Yield the files with what they hold, or with the error of reading them, in order; those behind a network are
    examined several at a time."""

    def examine(path: str) -> tuple[str, Contents | LazyckptError]:
        try:
            inner = cast("Store", Blocks(store, path)) if store.is_remote else store
            return path, examine_file(StoreFile(inner, path, tail=1 << 12, head=1 << 12), path)
        except LazyckptError as e:
            return path, e

    if not store.is_remote:
        yield from map(examine, paths)
        return
    with ThreadPoolExecutor(_TOGETHER, thread_name_prefix="lazyckpt-scan") as pool:
        late: deque[Future[tuple[str, Contents | LazyckptError]]] = deque()
        for path in paths:
            late.append(pool.submit(examine, path))
            if len(late) > 2 * _TOGETHER:
                yield late.popleft().result()
        while late:
            yield late.popleft().result()


def _local(root: str, findings: list[Finding]) -> Iterator[str]:
    """Yield the files below a local folder, and report links that leave it."""
    top = os.path.realpath(root)

    def failed(e: OSError) -> None:
        name = os.path.relpath(e.filename or root, root)
        findings.append(
            Finding("not-examined", f"{printable(name)}: {e.strerror or e}", None, severity="warning", todo="")
        )

    for folder, folders, files in os.walk(root, onerror=failed):
        folders.sort()
        for name in sorted(folders) + sorted(files):
            full = os.path.join(folder, name)
            inner = os.path.relpath(full, root).replace(os.sep, "/")
            if os.path.islink(full):
                target = os.path.realpath(full)
                if not _within(target, top) and not _is_blob(full, target):
                    text = f"{printable(inner)} is a link to {printable(target)}, outside of the folder"
                    findings.append(Finding("outside-link", text, inner))
            if name in folders:
                continue
            try:
                mode = os.stat(full).st_mode
            except OSError:
                continue  # a link to nothing
            if not stat.S_ISREG(mode):
                text = f"{printable(inner)} is no regular file"
                findings.append(Finding("not-examined", text, inner, severity="warning"))
                continue
            yield inner


def _within(path: str, top: str) -> bool:
    return path == top or path.startswith(os.path.join(top, ""))


def _is_blob(link: str, target: str) -> bool:
    """Return whether a link is one of the Hub's cache: from ``snapshots/REVISION/...`` to ``blobs`` beside it."""
    parts = os.path.abspath(link).split(os.sep)
    if "snapshots" not in parts:
        return False
    at = len(parts) - 1 - parts[::-1].index("snapshots")
    repository = os.path.realpath(os.sep.join(parts[:at]) or os.sep)
    return os.path.dirname(target) == os.path.join(repository, "blobs")


def _listed(store: Store, findings: list[Finding]) -> Iterator[str]:
    """Yield the files below the root of a store, those of a folder before those of its folders. Raises DataError if
    the server does not list folders; reports that a web server may hide files."""
    left = [""]
    hides = not store.listable
    while left:
        folder = left.pop()
        names = store.names(folder)
        if names is None and not folder:
            raise DataError(f"{store.root}: its server does not list folders. Scan its files by their own URLs")
        if names is None:
            text = f"{printable(folder)} is a folder that the server does not list"
            findings.append(Finding("not-examined", text, folder, severity="warning"))
            continue
        inside = sorted((f"{folder}/{name}".lstrip("/"), is_folder) for name, is_folder in names.items())
        hides = hides and not any(name.startswith(".") for name in names)
        yield from (name for name, is_folder in inside if not is_folder)
        left += [name for name, is_folder in reversed(inside) if is_folder]
    if hides:
        text = "the pages of the server show no file whose name begins with a dot: it may have some that it hides"
        findings.append(Finding("not-examined", text, None, todo="Download the folder and scan it, if that matters."))


def _with_code_named(findings: list[Finding]) -> list[Finding]:
    """Turn the notes about Python files into warnings if a configuration names code."""
    if not any("trust_remote_code" in str(one) for one in findings):
        return findings
    return [
        Finding(one.code, f"{one}; a configuration names code", one.file, severity="warning")
        if one.code == "shipped-code" and one.severity == "note" and (one.file or "").endswith(".py")
        else one
        for one in findings
    ]


def _names(seen: list[Contents]) -> list[Finding]:
    """Return a finding for each unknown name, and for each framework."""
    unknown: dict[tuple[str, str], list[Any]] = defaultdict(lambda: [False, []])
    packages: dict[str, tuple[set[str], list[str]]] = defaultdict(lambda: (set(), []))
    for contents in seen:
        for named, (verdict, called) in contents.names.items():
            if verdict.grade == "unknown":
                entry = unknown[named]
                entry[0] |= called
                entry[1].append(contents.file)
            elif verdict.grade == "framework":
                names, files = packages[verdict.why]
                names.add(f"{named.module}.{named.name}")
                if not files or files[-1] != contents.file:
                    files.append(contents.file)
    found = []
    for (module, name), (called, files) in unknown.items():
        text = printable(f"{module}.{name}"[:300])
        doing = "is called" if called else "is named"
        found.append(
            Finding(
                "unknown-global",
                f"{text} {doing} by {_files(files)}: it is not known to be harmless",
                files[0],
                details={"module": module, "name": name, "called": called, "files": files[:_FILES_NAMED]},
            )
        )
    for package, (names, files) in packages.items():
        classes = some(map(printable, sorted(names)))
        text = f"{plural(len(names), 'class', 'classes')} of {package} in {_files(files)}: {classes}"
        details = {"package": package, "names": sorted(names), "files": files[:_FILES_NAMED]}
        found.append(Finding("framework-class", text, files[0], details=details))
    return found


def _files(files: list[str]) -> str:
    first = printable(files[0])
    return first if len(files) == 1 else f"{first} and {plural(len(files) - 1, 'other file')}"


def _by_grade(seen: list[Contents]) -> dict[str, list[str]]:
    names: dict[str, set[str]] = {grade: set() for grade in GRADES}
    for contents in seen:
        for named, (verdict, _) in contents.names.items():
            names[verdict.grade].add(f"{named.module}.{named.name}")
    return {grade: sorted(found) for grade, found in names.items()}

"""Every fault of tests/faults/ is found: at its level and not below, with its code, file and tensor."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lazyckpt
from lazyckpt.errors import PROBLEM_CODES
from lazyckpt.inspect.codes import FINDING_CODES
from lazyckpt.inspect.report import Finding

from .faults import FAULTS, Fault, page
from .faults.fault import FAILS

LEVELS: list[Any] = ["quick", "default", "full"]
_sound: dict[str, set[tuple[str, str]]] = {}  # source -> code and tensor of what a sound copy has


def verified(path: Path, level: Any) -> list[Finding]:
    return list(lazyckpt.verify(path, level=level, progress=False))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_fault(fault: Fault, tmp_path: Path, checkpoints: Callable[[str], Path]) -> None:
    if "the cache of the Hub" in fault.what and os.name == "nt":
        pytest.skip("links need privileges")
    if "Zarr" in fault.family:
        pytest.importorskip("zarr")
    folder = tmp_path / "ckpt"
    if fault.source:
        group, case = fault.source.split("/", 1)
        shutil.copytree(checkpoints(group) / case, folder)
        if fault.source not in _sound:
            _sound[fault.source] = {(f.code, str(f)) for f in verified(folder, "full")}
    else:
        folder.mkdir()
    path = fault.make(folder) or folder
    if fault.found == FAILS:
        with pytest.raises(lazyckpt.LazyckptError):
            lazyckpt.verify(path, level="quick")
        return
    sound = _sound.get(fault.source, set())
    found = [f for f in verified(path, fault.found) if f.code == fault.code and (f.code, str(f)) not in sound]
    for one in found:
        file, tensor = re.search(fault.file, one.file or ""), re.search(fault.tensor, one.tensor or "")
        if file and tensor and re.search(fault.text, str(one)):
            break
    else:
        pytest.fail(f"not among {found or verified(path, 'full')}")
    assert one.todo and (not fault.file or one.file) and (not fault.tensor or one.tensor)
    for level in LEVELS[: LEVELS.index(fault.found)][-1:]:
        assert not [f for f in verified(path, level) if f.code == fault.code and (f.code, str(f)) not in sound]


def test_the_table() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    codes = {fault.code for fault in FAULTS if fault.found != FAILS}
    assert codes <= set(FINDING_CODES) | set(PROBLEM_CODES)
    # those of safety are of `lazyckpt scan`; manifests have tests of their own
    others = {"dangerous-pickle", "unknown-global", "framework-class", "pickle-bomb", "unusual-pickle", "shipped-code"}
    others |= {"outside-link"}
    assert set(FINDING_CODES) - codes - others <= {"digest-mismatch", "not-examined", "rounding-mismatch", "stale-file"}


def test_the_page_has_the_table() -> None:
    text = (Path(__file__).parents[1] / "docs/reference/faults.md").read_text("utf-8")
    assert text.endswith(page(FAULTS)), "python -m tests.faults writes the page"

"""Opening, slicing and reading whole state dicts, against torch.load, safetensors and deepspeed's own lazy mode."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from harness import Row, drop_cache, paired, peak_growth, report, resident_bytes, show_seconds
from safetensors.torch import load_file, save_file

import lazyckpt

MIB, GIB = 1 << 20, 1 << 30


def write(folder: Path) -> dict[str, Path]:
    """The files that are measured, made once: 2,000 small tensors; 1 GiB in 16 and in 1,024 tensors."""
    paths = {name: folder / name for name in ("many.pt", "big.pt", "big.safetensors", "mid.pt", "mid.safetensors")}
    if not all(p.exists() for p in paths.values()):
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({f"layers.{i // 10}.w{i % 10}": torch.randn(64, 64) for i in range(2000)}, paths["many.pt"])
        for stem, count, shape in (("big", 16, (16384, 1024)), ("mid", 1024, (256, 1024))):
            tensors = {f"layers.{i}.weight": torch.randn(shape) for i in range(count)}
            torch.save(tensors, paths[f"{stem}.pt"])
            save_file(tensors, paths[f"{stem}.safetensors"])
    return paths


def opening(paths: dict[str, Path]) -> list[Row]:
    many, big = paths["many.pt"], paths["big.pt"]
    rows = []
    for label, kwargs in (("", {}), (", weights_only=False", {"weights_only": False})):
        a, b, ratio = paired(
            lambda: lazyckpt.open(many, cache=False), lambda kw=kwargs: torch.load(many, mmap=True, **kw)
        )
        what = f"open 2,000 tensors, peer torch.load(mmap=True{label})"
        rows.append(Row(what, show_seconds(a), show_seconds(b), ratio, 0.5 if not label else 1.0))
    drop_cache(big)
    lazyckpt.open(big, cache=False)
    touched, size = resident_bytes(big), big.stat().st_size
    rows.append(Row("open a 1 GiB file cold: bytes read / size", f"{touched:,} B", f"{size:,} B", touched / size, 0.01))
    return rows


def slicing(paths: dict[str, Path]) -> list[Row]:
    path, name = paths["big.pt"], "layers.7.weight"
    rows = []
    for lo, hi in ((1000, 1016), (1000, 1256), (1000, 2024), (1000, 9192)):
        wanted = (hi - lo) * 1024 * 4
        drop_cache(path)
        view = lazyckpt.open(path, cache=False)
        before = resident_bytes(path)
        tensor = view[name][lo:hi]
        read = resident_bytes(path) - before
        assert tensor.nbytes == wanted
        pages = -(-wanted // 4096) + 1  # a run that is not aligned touches one page more
        what = f"cold row slice of {wanted // 1024:,} KiB: bytes read / bytes wanted (whole pages)"
        rows.append(Row(what, f"{read:,} B", f"{pages * 4096:,} B", read / (pages * 4096), 1.05))
    mapped = torch.load(path, mmap=True)
    view = lazyckpt.open(path)
    for lo, hi in ((1000, 1016), (1000, 1256), (1000, 2024), (1000, 5096), (1000, 9192), (0, 16384)):
        a, b, ratio = paired(
            lambda lo=lo, hi=hi: view[name][lo:hi], lambda lo=lo, hi=hi: mapped[name][lo:hi].clone(), runs=101
        )
        what = f"warm row slice of {(hi - lo) * 4:,} KiB, peer torch.load(mmap=True)[name][slice].clone()"
        rows.append(Row(what, show_seconds(a), show_seconds(b), ratio, 1.1))
    return rows


def whole(paths: dict[str, Path]) -> list[Row]:
    rows = []
    for stem, count in (("big", 16), ("mid", 1024)):
        st, pt = paths[f"{stem}.safetensors"], paths[f"{stem}.pt"]
        view, view_pt = lazyckpt.open(st), lazyckpt.open(pt)
        of = f"1 GiB in {count:,} tensors"
        a, b, ratio = paired(lambda v=view: v.to("cpu", copy=False), lambda p=st: load_file(p))
        rows.append(
            Row(f"{of}, copy=False, peer safetensors load_file (both map)", show_seconds(a), show_seconds(b), ratio, 1)
        )
        a, b, ratio = paired(
            lambda v=view: v.to("cpu"), lambda p=st: {k: t.clone() for k, t in load_file(p).items()}, runs=7
        )
        rows.append(Row(f"{of} into memory, peer load_file + clone", show_seconds(a), show_seconds(b), ratio, 1))
        a, b, ratio = paired(lambda v=view_pt: v.to("cpu"), lambda p=pt: torch.load(p), runs=7)
        rows.append(Row(f"{of} into memory, peer torch.load", show_seconds(a), show_seconds(b), ratio, 1))
    return rows


_ZERO = """
import json, sys
sys.path.insert(0, {tests!r})
from tests.writers.deepspeed_zero import ZeroSpec, write_many
from pathlib import Path
out = Path({out!r})
write_many(out.parent, {{out.name: ZeroSpec(stage={stage}, dtype="bf16", dp=2, hidden=2048, layers=4, vocab=16384)}})
"""


def memory(folder: Path) -> list[Row]:
    """One tensor out of a ZeRO checkpoint of real DeepSpeed (several hundred MB of fp32 weights)."""
    rows = []
    root = Path(__file__).parent.parent
    for stage in (2, 3):
        out = folder / f"zero{stage}"
        if not (out / "truth" / "info.json").exists():
            program = _ZERO.format(tests=str(root), out=str(out), stage=stage)
            subprocess.run([sys.executable, "-c", program], check=True, cwd=root)
        shapes = json.loads((out / "truth" / "info.json").read_text())["shapes"]
        name = max(shapes, key=lambda n: shapes[n][0] * (shapes[n][1] if len(shapes[n]) > 1 else 1))
        open_it = f"import lazyckpt, torch\nview = lazyckpt.open({str(out / 'ckpt')!r})"
        size = lazyckpt.open(out / "ckpt").states["fp32"][name].nbytes
        total = lazyckpt.open(out / "ckpt").states["fp32"].nbytes
        grown = peak_growth(open_it, f"t = view.states['fp32'][{name!r}][...]")
        what = (
            f"one {size // MIB} MiB tensor of a ZeRO-{stage} model of {total // MIB} MiB: peak memory / (it + 64 MiB)"
        )
        rows.append(Row(what, f"{grown / MIB:.0f} MiB", f"{size / MIB + 64:.0f} MiB", grown / (size + 64 * MIB), 1.0))
        if stage == 2:
            theirs = peak_growth(
                "from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as get",
                f"t = get({str(out / 'ckpt')!r}, lazy_mode=True)[{name!r}].contiguous()",
            )
            rows.append(
                Row(
                    "the same, peer deepspeed lazy_mode=True",
                    f"{grown / MIB:.0f} MiB",
                    f"{theirs / MIB:.0f} MiB",
                    grown / theirs,
                    1,
                )
            )
    return rows


def main(folder: Path) -> list[Row]:
    paths = write(folder)
    rows = []
    for title, part in (("Opening", opening), ("Slices", slicing), ("Whole state dicts", whole)):
        found = part(paths)
        report(title, found)
        rows += found
    found = memory(folder)
    report("Memory", found)
    return rows + found

"""Golden checkpoints: recorded output of real writers with its truth, as ``tests/golden/GROUP/CASE.tar.xz``.

A group is the output of one writer: a folder with a subfolder for each case. ``golden/GROUP/writers.json`` has the
versions of the packages that wrote the recordings. The fixtures of conftest.py unpack them; with ``--lane=all`` they
run the writers instead, which also write the cases that are not recorded.

``python -m tests.recordings [GROUP...]`` runs the installed writers and compares their checkpoints with the recorded
ones: the cases, the files of each, every tensor in them by name, shape and dtype, and the values of the truth and of
all states. It exits with 1 if they differ. With ``--write``, it replaces the recordings.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import io
import json
import lzma
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

import lazyckpt

from .writers import (
    Case,
    bit_equal,
    deepspeed_launch,
    deepspeed_more,
    deepspeed_newer,
    deepspeed_run,
    deepspeed_specs,
    deepspeed_zero,
    frameworks,
    megatron_core,
    megatron_fsdp,
    nemo_files,
    orbax_files,
    rank_files,
    run_folders,
    torch_dcp,
    torch_programs,
    trainers,
    verl_files,
)

__all__ = ["GOLDEN", "GROUPS", "Group", "archives", "missing", "recorded", "unpack"]

GOLDEN = Path(__file__).parent / "golden"
# The time of every recorded file, so that an unchanged case results in an identical archive.
CHANGED = 1_700_000_000
# DeepSpeed copies its scripts into each checkpoint: 40 KB without tensors.
LEFT_OUT = ("zero_to_fp32.py", "zero_to_torch.py")
CLOSE = 1e-3  # tolerance for recorded values, relative to the largest value: processors round differently


@dataclass(frozen=True)
class Group:
    """The cases of one writer."""

    names: tuple[str, ...]
    """Names of the cases, and of their folders."""
    write: Callable[[Path], object]
    """Writes all cases into a folder."""
    load: Callable[[Path, str], Mapping[str, Case]]
    """Loads one case from that folder; a case with several checkpoints returns several names."""
    packages: tuple[str, ...]
    """Distributions of the writer, whose versions are recorded."""
    modules: tuple[str, ...] = ()
    """Modules that the writer needs."""
    unrecorded: frozenset[str] = frozenset()
    """Cases that only ``--lane=all`` writes: combinations of properties that other cases have individually."""


def _deepspeed(folder: Path, name: str) -> dict[str, Case]:
    return {name: deepspeed_launch.load_case(folder / name)}


def _saved(folder: Path, name: str) -> dict[str, Case]:
    truth = torch.load(folder / name / "truth.pt")
    info = json.loads((folder / name / "info.json").read_text())
    return {name: Case(folder / name / "ckpt", {"weights": truth["weights"]}, info)}


def _run(folder: Path, name: str) -> dict[str, Case]:
    return {f"{name}.{tag}": case for tag, case in deepspeed_run.load(folder)[name].items()}


def _megatron(folder: Path, name: str) -> dict[str, Case]:
    kinds = ("legacy", "dist")
    return {f"{name}.{kind}": megatron_core.load_case(folder, name, kind) for kind in kinds}


def _write_huggingface(folder: Path) -> None:
    from .writers import huggingface  # (it imports transformers)

    huggingface.write_all(folder)


def _write_gguf(folder: Path) -> None:
    from .writers import gguf_files  # (it imports gguf)

    gguf_files.write_all(folder)


def _quantized(name: str, packages: tuple[str, ...], cases: str) -> Group:
    """The cases of a quantizer, whose module tests/writers/quantized_NAME.py imports transformers."""

    def write(folder: Path) -> None:
        importlib.import_module(f"{__package__}.writers.quantized_{name}").write_all(folder)

    modules = ["awq" if one == "autoawq" else one for one in packages]
    return Group(tuple(cases.split()), write, _saved, (*packages, "transformers", "torch"), (*modules, "transformers"))


def _array_files(module: str, packages: tuple[str, ...], modules: tuple[str, ...], *files: str) -> Group:
    """Files of arrays, which tests/writers/MODULE.py writes into one folder with what it held, ``truth.npz``."""

    def write(folder: Path) -> None:
        (folder / "files" / "ckpt").mkdir(parents=True)
        importlib.import_module(f"{__package__}.writers.{module}").write_all(folder / "files" / "ckpt")

    def load(folder: Path, name: str) -> dict[str, Case]:
        cases = {file: Case(folder / name / "ckpt" / file, {}, {}) for file in (*files, "truth.npz")}
        return {file: case for file, case in cases.items() if case.path.exists()}  # (new ones are not recorded yet)

    return Group(("files",), write, load, packages, modules)


_ZERO = deepspeed_zero.CROSS | deepspeed_zero.OPTIONS
GROUPS = {
    "deepspeed_zero": Group(
        tuple(_ZERO),
        lambda folder: deepspeed_launch.launch(folder, _ZERO),
        _deepspeed,
        ("deepspeed", "torch"),
        ("deepspeed",),
        frozenset(_ZERO) - set(deepspeed_zero.RECORDED),
    ),
    "deepspeed_kinds": Group(
        (*deepspeed_more.NAMES, *deepspeed_more.RESHAPED),
        deepspeed_more.write_all,
        _deepspeed,
        ("deepspeed", "transformers", "torch"),
        ("deepspeed", "transformers"),
        frozenset(name for name in deepspeed_more.NAMES if name.split(".")[0] in deepspeed_more.UNRECORDED),
    ),
    "deepspeed_newer": Group(
        tuple(deepspeed_newer.SPECS), deepspeed_newer.write_all, _deepspeed, ("deepspeed", "torch"), ("deepspeed",)
    ),
    "deepspeed_older": Group(  # needs deepspeed 0.18
        tuple(deepspeed_newer.OLDER),
        deepspeed_newer.write_older,
        _deepspeed,
        ("deepspeed", "torch"),
        ("deepspeed", "deepspeed.runtime.zero.mics"),
    ),
    "deepspeed_run": Group(
        tuple(deepspeed_run.SPECS), deepspeed_run.write, _run, ("deepspeed", "torch"), ("deepspeed",)
    ),
    "models": Group(
        tuple(deepspeed_specs.HF_MODELS),
        lambda folder: deepspeed_launch.launch(folder, deepspeed_specs.HF_MODELS),
        _saved,
        ("deepspeed", "transformers", "peft", "torch"),
        ("deepspeed", "transformers", "peft"),
    ),
    "huggingface": Group(
        ("llama_sharded", "llama_single", "bert", "mixtral", "bin_sharded"),
        _write_huggingface,
        _saved,
        ("transformers", "safetensors", "torch"),
        ("transformers",),
    ),
    "quantized_gptq": _quantized(
        "gptq",
        ("gptqmodel", "auto_gptq"),
        "w4_v1_sharded_tied w4_v2_act_order w3_v1 w3_planar w8_v2_odd_groups w2_v1_borrows w5_planar w4_dynamic "
        "w4_autogptq w2_autogptq w4_marlin w4_marlin_one_group",
    ),
    "quantized_awq": _quantized("awq", ("autoawq",), "gemm_sharded_tied gemm_one_group gemv gemv_fast"),
    "quantized_bitsandbytes": _quantized(
        "bitsandbytes", ("bitsandbytes",), "nf4_double_sharded_tied fp4 nf4_in_bf16_words int8 nf4_gpt2"
    ),
    "quantized_hqq": _quantized(
        "hqq",
        ("hqq",),
        "w4_axis1_sharded w4_axis0_pt w8_axis1_pt w3_axis1 w3_axis0 w2_axis0 w1_axis1 w4_as_float w4_nested_pt",
    ),
    "quantized_mlx": _quantized("mlx", ("mlx",), "w4_sharded_tied mixed w3_experts w6_float32 mxfp4 mxfp8 nvfp4"),
    "quantized_gguf": _quantized("gguf", ("gguf",), "blocks"),
    "gguf": Group(
        ("every", "version1", "version2", "split", "big_endian", "big_endian_blocks"),
        _write_gguf,
        _saved,
        ("gguf", "torch"),
        ("gguf",),
    ),
    "quantized_torchao": _quantized(
        "torchao", ("torchao",), "int8_sharded_tied float8 intx mixed_pt microscaling microscaling_pt int4 int4_pt"
    ),
    "quantized_torchao_v1": _quantized("torchao_v1", ("torchao",), "v1_int8_pt v1_mixed_pt"),
    "torch_programs": Group(
        tuple(torch_programs.CASES),
        torch_programs.write_all,
        lambda folder, name: {name: torch_programs.load_case(folder, name)},
        ("torch",),
    ),
    "dcp": Group(
        tuple(torch_dcp.CASES),
        torch_dcp.write_all,
        lambda folder, name: {name: torch_dcp.load_case(folder, name)},
        ("torch",),
    ),
    "rank_files": Group(
        tuple(rank_files.CASES),
        rank_files.write_all,
        lambda folder, name: {name: torch_dcp.load_case(folder, name)},
        ("torch", "accelerate"),
        ("accelerate",),
    ),
    "megatron": Group(
        tuple(megatron_core.CASES),
        megatron_core.write_all,
        _megatron,
        ("megatron-core", "torch"),
        ("megatron",),
        frozenset({"ep2_hybrid", "pp2_dp2_hybrid_distopt"}),
    ),
    "orbax": Group(
        orbax_files.CASES,
        orbax_files.write_all,
        lambda folder, name: {name: orbax_files.load_case(folder, name)},
        orbax_files.PACKAGES,
        ("jax", "flax", "optax", "orbax"),
    ),
    "megatron_fsdp": Group(
        tuple(megatron_fsdp.CASES),
        megatron_fsdp.write_all,
        lambda folder, name: {name: megatron_fsdp.load_case(folder, name)},
        ("megatron-core", "torch"),
        ("megatron",),
    ),
    "nemo": Group(
        tuple(nemo_files.CASES),
        nemo_files.write_all,
        lambda folder, name: {name: nemo_files.load_case(folder, name)},
        ("nemo-toolkit", "megatron-core", "torch"),
        ("nemo", "megatron"),
    ),
    "frameworks": Group(
        tuple(frameworks.CASES),
        frameworks.write_all,
        lambda folder, name: {name: frameworks.load_case(folder, name)},
        ("ai2-olmo-core", "nanotron", "torchsnapshot", "torch"),
        ("nanotron", "dacite", "olmo_core", "torchsnapshot"),
    ),
    "keras": _array_files(
        "keras_files",
        ("h5py", "keras"),
        ("h5py", "keras"),
        "model.keras",
        "model.weights.h5",
        "old.h5",
        "half.weights.h5",
    ),
    "flax": _array_files(
        "flax_files",
        ("flax", "jax", "optax"),
        ("flax", "jax", "optax"),
        "params.msgpack",
        "state.msgpack",
        "pieces.msgpack",
    ),
    "tensorflow": _array_files(
        "tensorflow_golden", ("tensorflow-cpu",), ("tensorflow",), "ckpt-1.index", "model.ckpt-2.index"
    ),
    "verl": Group(
        tuple(verl_files.CASES),
        verl_files.write_all,
        lambda folder, name: {name: verl_files.load_case(folder, name)},
        ("verl", "megatron-core", "peft", "transformers", "torch"),
        ("verl", "megatron", "peft"),
    ),
    "run_folders": Group(
        tuple(run_folders.CASES),
        run_folders.write_all,
        lambda folder, name: {name: run_folders.load_case(folder, name)},
        ("colossalai", "jax", "levanter", "lightning", "litgpt", "mlx", "mlx-lm", "mosaicml", "optax", "torch"),
        ("colossalai", "composer", "levanter", "lightning", "litgpt", "mlx_lm"),
    ),
    "trainers": Group(
        tuple(trainers.CASES),
        trainers.write_all,
        lambda folder, name: {name: trainers.load_case(folder, name)},
        ("accelerate", "lightning", "torch_checkpointing", "torchtitan", "transformers", "deepspeed", "torch"),
        ("accelerate", "lightning", "torch_checkpointing", "torchtitan", "transformers", "deepspeed"),
        frozenset(name for name, spec in trainers.CASES.items() if "torchtune" in spec.needs),
    ),
}


def missing(group: str) -> str:
    """The first module that writing a group needs and that is not installed; "" if all are."""
    return next((m for m in GROUPS[group].modules if importlib.util.find_spec(m) is None), "")


# -- archives


def recorded(group: str) -> list[str]:
    """The cases that are to be recorded."""
    return [name for name in GROUPS[group].names if name not in GROUPS[group].unrecorded]


def archives(group: str) -> list[str]:
    """Return the names of the archives. A case and its conversions (``CASE.universal``) share one archive."""
    return list(dict.fromkeys(name.partition(".")[0] for name in recorded(group)))


def unpack(group: str, folder: Path) -> None:
    """Unpack the recorded cases of a group into a folder."""
    for path in sorted((GOLDEN / group).glob("*.tar.xz")):
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")


def pack(folder: Path, name: str) -> bytes:
    """Pack a case and its conversions into an archive that depends only on names and bytes."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        tops = [folder / name, *sorted(folder.glob(f"{name}.*"))]
        for path in (path for top in tops for path in sorted(top.rglob("*"))):
            if path.name not in LEFT_OUT:
                archive.add(path, path.relative_to(folder).as_posix(), recursive=False, filter=_anonymous)
    return lzma.compress(plain.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = CHANGED, 0, 0, "", ""
    entry.mode = 0o755 if entry.isdir() else 0o644
    return entry


def record(group: str, folder: Path) -> None:
    """Replace the recordings of a group with the cases in a folder."""
    target = GOLDEN / group
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        old.unlink()
    for name in archives(group):
        (target / f"{name}.tar.xz").write_bytes(pack(folder, name))
    versions = {package: importlib.metadata.version(package) for package in sorted(GROUPS[group].packages)}
    (target / "writers.json").write_text(json.dumps(versions, indent=2) + "\n")


# -- comparing


def differences(group: str, old: Path, new: Path) -> Iterator[str]:
    """Yield the differences between the cases in two folders, one line each."""
    for name in recorded(group):
        if not (old / name).is_dir() or not (new / name).is_dir():
            yield f"{name}: {'not recorded yet' if (new / name).is_dir() else 'no longer written'}"
            continue
        yield from _named(name, "files", _files(old / name), _files(new / name))
        before, after = GROUPS[group].load(old, name), GROUPS[group].load(new, name)
        for case in before:
            yield from _of_cases(case, before[case], after[case])


def _files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.name not in LEFT_OUT}


def _named(case: str, what: str, old: Iterable[str], new: Iterable[str]) -> Iterator[str]:
    old, new = set(old), set(new)
    for names, word in ((old - new, "missing"), (new - old, "new")):
        if names:
            some = ", ".join(sorted(names)[:5])
            yield f"{case}: {what} {word}: {some}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _of_cases(name: str, old: Case, new: Case) -> Iterator[str]:
    yield from _named(name, "states", old.truth, new.truth)
    for state in set(old.truth) & set(new.truth):
        yield from _of_tensors(f"{name}: truth, {state}", old.truth[state], new.truth[state])
    views = [lazyckpt.open(case.path, **case.info.get("open", {})) for case in (old, new)]
    if views[0].format != views[1].format:
        yield f"{name}: the format was {views[0].format} and is {views[1].format}"
    # stored values are not compared, because DeepSpeed's padding is uninitialized memory
    yield from _of_tensors(f"{name}: stored", *(view.stored.to("meta") for view in views))
    yield from _named(name, "states read", views[0].states, views[1].states)
    for state in set(views[0].states) & set(views[1].states):
        yield from _of_tensors(f"{name}: read, {state}", *(_read(view.states[state]) for view in views))


def _read(view: lazyckpt.CheckpointView) -> dict[str, torch.Tensor | str]:
    """Each tensor of a view; of one that cannot be read, the name of the error."""
    found: dict[str, torch.Tensor | str] = {}
    for name, tensor in view.items():
        try:
            found[name] = tensor[...]
        except lazyckpt.LazyckptError as e:
            found[name] = type(e).__name__
    return found


def _of_tensors(
    where: str, old: Mapping[str, torch.Tensor | str], new: Mapping[str, torch.Tensor | str]
) -> Iterator[str]:
    yield from _named(where, "tensors", old, new)
    for name in sorted(set(old) & set(new)):
        a, b = old[name], new[name]
        if isinstance(a, str) or isinstance(b, str):
            if _kind(a) != _kind(b):
                yield f"{where}: {name} was read as {_kind(a)} and is read as {_kind(b)}"
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            yield f"{where}: {name} was {a.dtype} {tuple(a.shape)} and is {b.dtype} {tuple(b.shape)}"
        elif not a.is_meta and not bit_equal(a, b) and not _close(a, b):
            yield f"{where}: {name} has other values"


def _kind(found: torch.Tensor | str) -> str:
    return found if isinstance(found, str) else "a tensor"


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not (a.is_floating_point() or a.is_complex()) or a.element_size() < 2:
        return False
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.detach().to(wide), b.detach().to(wide)
    scale = x.abs().nan_to_num(0.0, 0.0).max().item()
    return bool(torch.allclose(x, y, rtol=CLOSE, atol=CLOSE * scale, equal_nan=True))


def main() -> None:
    parser = argparse.ArgumentParser(prog="./run golden", description="Compare recorded checkpoints with new ones.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; by default all")
    parser.add_argument("--write", action="store_true", help="replace the recordings")
    asked = parser.parse_args()
    if unknown := set(asked.groups) - set(GROUPS):
        parser.error(f"no such group: {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    changed = False
    for group in asked.groups or GROUPS:
        with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
            old, new = Path(scratch) / "old", Path(scratch) / "new"
            old.mkdir()
            new.mkdir()
            if module := missing(group):
                print(f"{group}: not written, because {module} is not installed", flush=True)
                changed = True
                continue
            GROUPS[group].write(new)
            if (GOLDEN / group / "writers.json").exists():
                unpack(group, old)
                before = json.loads((GOLDEN / group / "writers.json").read_text())
                for package, version in before.items():
                    if (now := importlib.metadata.version(package)) != version:
                        print(f"{group}: recorded with {package} {version}, written with {now}")
            lines = list(differences(group, old, new))
            for line in lines:
                print(f"{group}: {line}")
            print(f"{group}: {len(recorded(group))} cases, {len(lines)} differences", flush=True)
            changed |= bool(lines)
            if asked.write:
                record(group, new)
    sys.exit(changed and not asked.write)


if __name__ == "__main__":
    main()

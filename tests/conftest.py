"""Checkpoints for the tests, made once a session by one of its processes.

Real writers made the checkpoints: they are unpacked from recordings (recordings.py), or written anew in the lane "all".
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import random
import shutil
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import pytest
import torch
from filelock import FileLock  # torch depends on it

import lazyckpt

from . import processes, recordings
from .servers.fixtures import azurite, cloud, moto, s3  # noqa: F401  fixtures
from .writers import (
    Case,
    frameworks,
    megatron_core,
    orbax_files,
    rank_files,
    run_folders,
    torch_contents,
    torch_dcp,
    torch_files,
    trainers,
    verl_files,
)

os.environ["LAZYCKPT_CACHE"] = "0"  # tests neither use nor fill the user's cache; those of the cache have their own

T = TypeVar("T")
Checkpoints = Callable[[str], Path]

collect_ignore = ["writers", "writing_on_windows.py"]  # no tests; writers import optional libraries

# Fixtures with cases that are not recorded -> the group of recordings.
FIXTURES = {
    "zero_cases": "deepspeed_zero",
    "kinds": "deepspeed_kinds",
    "trainer_cases": "trainers",
    "megatron_folder": "megatron",
}

# Fixtures that take seconds or start processes: one worker makes each and runs its tests, so that no other worker waits
# for it or makes it again.
LONG = {
    "bomb_range", "browser", "cost_range", "finished", "loaded", "megatron_logits", "ran", "resumed",
    "thousand", "tools", "zarr_cases",
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _not_recorded(item):
            item.add_marker("full")
        for name in LONG.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(name))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Start the common random numbers anew: no test depends on those that ran before it in its process."""
    random.seed(0)
    np.random.seed(0)  # (of libraries that the tests call)
    torch.manual_seed(0)


def pytest_sessionfinish() -> None:
    processes.end()


def _not_recorded(item: pytest.Item) -> bool:
    """Return whether a parameter of a test is the name of a case that is not recorded."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return False
    values = {value for value in item.callspec.params.values() if isinstance(value, str)}
    groups = [group for fixture, group in FIXTURES.items() if fixture in item.fixturenames]
    return any(values & recordings.GROUPS[group].unrecorded for group in groups)


def once(folder: Path, name: str, write: Callable[[Path], T]) -> T:
    """Call ``write`` once per session, in the first process that needs it; return the same result in all processes."""
    done = folder / f"{name}.pickle"
    with FileLock(folder / f"{name}.lock"):
        if not done.exists():
            (folder / name).mkdir()
            try:
                answer: Any = write(folder / name)
            except Exception as e:
                answer = RuntimeError(f"{type(e).__name__}: {e}")
            done.write_bytes(pickle.dumps(answer))
    answer = pickle.loads(done.read_bytes())
    if isinstance(answer, RuntimeError):
        raise answer
    result: T = answer
    return result


def need(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: it writes the checkpoints that are read here")


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of the session share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


# -- checkpoints of real writers


@pytest.fixture(scope="session")
def checkpoints(session_folder: Path, pytestconfig: pytest.Config) -> Checkpoints:
    """A function that returns the folder with the cases of a group of recordings.py."""
    anew = pytestconfig.getoption("lane") == "all"

    def of(group: str) -> Path:
        if anew:
            if module := recordings.missing(group):
                pytest.skip(f"{module} is not installed: it writes the checkpoints that are read here")
            once(session_folder, group, lambda folder: bool(recordings.GROUPS[group].write(folder)))
        else:
            once(session_folder, group, lambda folder: recordings.unpack(group, folder))
        return session_folder / group

    return of


class Cases(Mapping[str, Case]):
    """The cases of a group, by name, loaded on access."""

    def __init__(self, group: str, folder: Path) -> None:
        self.group, self.folder = recordings.GROUPS[group], folder

    def __getitem__(self, name: str) -> Case:
        if name not in self.group.names:
            raise KeyError(name)
        if not (self.folder / name).is_dir():
            if name in trainers.CASES:
                need(*trainers.CASES[name].needs)
            raise KeyError(f"{name} is not recorded: a test of it is to be marked full")
        return self.group.load(self.folder, name)[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.group.names if (self.folder / name).is_dir())

    def __len__(self) -> int:
        return sum(1 for _ in self)


# -- DeepSpeed

# one case of each layout, for tests that do not depend on sizes and dtypes
ZERO_KINDS = (
    "zero1_fp16_dp3",
    "zero1_no_frozen",
    "zero2_aligned_round_robin",
    "zero2_elastic",
    "zero2_client_state",
    "zero2_fp32_lion",
    "zero3_sub_groups",
    "zero3_no_frozen",
    "zero3_fp32_dp4",
    "bf16_optimizer_dp3",
)


# a few of them, where a test costs much of each
ZERO_FEW = ("zero1_fp16_dp3", "zero2_aligned_round_robin", "zero3_sub_groups", "bf16_optimizer_dp3")


@pytest.fixture(scope="session")
def zero_cases(checkpoints: Checkpoints) -> Mapping[str, Case]:
    """All DeepSpeed cases, as their writer left them."""
    return Cases("deepspeed_zero", checkpoints("deepspeed_zero"))


@pytest.fixture(params=recordings.GROUPS["deepspeed_zero"].names)
def zero_case(request: pytest.FixtureRequest, zero_cases: Mapping[str, Case]) -> Case:
    return zero_cases[request.param]


@pytest.fixture(params=ZERO_KINDS)
def zero_kind(request: pytest.FixtureRequest, zero_cases: Mapping[str, Case]) -> Case:
    """One case of each layout."""
    return zero_cases[request.param]


@pytest.fixture(scope="session")
def kinds(checkpoints: Checkpoints) -> Mapping[str, Case]:
    """Every other kind of DeepSpeed checkpoint (tests/writers/deepspeed_more.py)."""
    return Cases("deepspeed_kinds", checkpoints("deepspeed_kinds"))


@pytest.fixture(scope="session")
def newer_cases(checkpoints: Checkpoints) -> Mapping[str, Case]:
    """What DeepSpeed's newer and removed writers saved (tests/writers/deepspeed_newer.py)."""
    return ChainMap(*(dict(Cases(group, checkpoints(group))) for group in ("deepspeed_newer", "deepspeed_older")))


# -- Hugging Face

HUGGINGFACE = recordings.GROUPS["huggingface"].names


@pytest.fixture(scope="session")
def program_cases(checkpoints: Checkpoints) -> Mapping[str, Case]:
    """Programs of torch with their weights (tests/writers/torch_programs.py)."""
    return Cases("torch_programs", checkpoints("torch_programs"))


@pytest.fixture(scope="session")
def huggingface_cases(checkpoints: Checkpoints) -> Mapping[str, Case]:
    return Cases("huggingface", checkpoints("huggingface"))


@pytest.fixture(params=HUGGINGFACE)
def huggingface_case(request: pytest.FixtureRequest, huggingface_cases: Mapping[str, Case]) -> Case:
    return huggingface_cases[request.param]


# -- files of torch.save


def torch_case(path: Path, tree: Any, more: Mapping[str, torch.Tensor] | None = None) -> Case:
    """Return the tensors of a saved tree by name. ``more`` are tensors inside objects that only pickle enters."""
    found = {".".join(map(str, keys)): t for keys, t in torch_contents.walk(tree).items()}
    found |= more or {}
    weights = {name: t.detach().as_subclass(torch.Tensor) for name, t in found.items()}
    return Case(path, {"weights": weights}, {"tied": _same_memory(weights)}, stored=weights)


def _same_memory(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    owners: dict[Any, str] = {}
    tied = {}
    for name, t in tensors.items():
        lies = (t.data_ptr(), t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg())
        if t.numel() and owners.setdefault(lies, name) != name:
            tied[name] = owners[lies]
    return tied


def _training(folder: Path, write: Callable[..., torch_files.Written], *args: Any) -> Case:
    path, tree = write(folder, *args)
    objects = tree["objects"]
    inside = {
        "objects.dataclass.ema": objects["dataclass"].ema,
        "objects.custom.weight": objects["custom"].weight,
        "objects.module._parameters.weight": objects["module"].weight,
        "objects.module._parameters.bias": objects["module"].bias,
    }
    raw = torch_case(path, tree, inside).truth["weights"]
    names = list(tree["model"])
    truth = {"weights": {name: raw[f"model.{name}"] for name in names}}
    for state in ("exp_avg", "exp_avg_sq", "step"):
        truth[state] = {name: raw[f"optimizer.state.{n}.{state}"] for n, name in enumerate(names)}
    return Case(path, truth, {"tied": {}}, stored=raw)


def _list_root(folder: Path) -> Case:
    tree = [torch.arange(6.0).view(2, 3), {"a": torch.arange(4), "b": [torch.ones(2, dtype=torch.bool)]}]
    torch.save(tree, folder / "list.pt")
    return torch_case(folder / "list.pt", tree)


def _big_endian(folder: Path) -> Case:
    """A file as torch.save writes it on a big-endian machine: with a byteorder record and byte-swapped elements."""
    plain = torch_contents.tied_state_dict() | torch_contents.classic_dtypes()
    turned = {name: _turned(t) for name, t in plain.items()}
    plain |= {"transposed": plain["mlp.weight"].t(), "column": plain["mlp.weight"][:, 1], "conj": plain["complex64"].mH}
    turned |= {"transposed": turned["mlp.weight"].t(), "column": turned["mlp.weight"][:, 1]}
    turned["conj"] = turned["complex64"].mH
    plain["head.weight"] = plain["embed.weight"]
    turned["head.weight"] = turned["embed.weight"]
    with mock.patch.object(sys, "byteorder", "big"):
        torch.save(turned, folder / "big.pt")
    return torch_case(folder / "big.pt", plain)


def _turned(t: torch.Tensor) -> torch.Tensor:
    unit = t.element_size() // (2 if t.is_complex() else 1)
    return t.reshape(-1).view(torch.uint8).view(-1, unit).flip(1).view(-1).view(t.dtype).view(t.shape)


TORCH: dict[str, Callable[[Path], Case]] = {
    "flat": lambda folder: torch_case(*torch_files.write_flat(folder)),
    "views": lambda folder: torch_case(*torch_files.write_views(folder)),
    "wrapped": lambda folder: torch_case(*torch_files.write_wrapped(folder)),
    "training": lambda folder: _training(folder, torch_files.write_training),
    "protocol3": lambda folder: _training(folder, torch_files.write_protocol, 3),
    "protocol4": lambda folder: _training(folder, torch_files.write_protocol, 4),
    "protocol5": lambda folder: _training(folder, torch_files.write_protocol, 5),
    "legacy": lambda folder: torch_case(*torch_files.write_legacy(folder)),
    "legacy_training": lambda folder: _training(folder, torch_files.write_legacy_training),
    "aligned4096": lambda folder: torch_case(*torch_files.write_aligned(folder, 4096)),
    "no_crc": lambda folder: torch_case(*torch_files.write_no_crc(folder)),
    "big_endian": _big_endian,
    "list_root": _list_root,
    "single": lambda folder: torch_case(*torch_files.write_single(folder)),
}


# one of each layout of storages, without the versions of the pickle protocol and of the zip
TORCH_FEW = ("flat", "views", "wrapped", "training", "legacy", "big_endian", "single")


@pytest.fixture(scope="session")
def torch_cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {name: write(tmp_path_factory.mktemp(name)) for name, write in TORCH.items()}


@pytest.fixture(params=TORCH)
def torch_save_case(request: pytest.FixtureRequest, torch_cases: dict[str, Case]) -> Case:
    return torch_cases[request.param]


# -- torch.distributed.checkpoint


@pytest.fixture(scope="session")
def dcp_cases(checkpoints: Checkpoints) -> Mapping[str, Case]:
    return Cases("dcp", checkpoints("dcp"))


DCP_NAMES = tuple(name for name in torch_dcp.CASES if name != "unknown_codec")
# one of each kind of placement, file and name
DCP_FEW = (
    "flat", "fsdp2_uneven", "hsdp", "tensor_parallel", "wrapped", "zstd", "odd", "hub_ranks", "file_per_item",
    "experts",
)  # fmt: skip


@pytest.fixture(params=DCP_NAMES)
def dcp_case(request: pytest.FixtureRequest, dcp_cases: Mapping[str, Case]) -> Case:
    return dcp_cases[request.param]


@pytest.fixture
def dcp_hole(dcp_cases: Mapping[str, Case], tmp_path: Path) -> tuple[lazyckpt.CheckpointView, Case]:
    """A checkpoint of three ranks in which the second rank's file is missing."""
    case = dcp_cases["fsdp2_uneven"]
    shutil.copytree(case.path, tmp_path / "ckpt")
    (tmp_path / "ckpt" / "__1_0.distcp").unlink()
    return lazyckpt.open(tmp_path / "ckpt"), case


@pytest.fixture(scope="session")
def rank_cases(checkpoints: Checkpoints) -> Mapping[str, Case]:
    return Cases("rank_files", checkpoints("rank_files"))


@pytest.fixture(params=[name for name in rank_files.CASES if name != "partial"])
def rank_case(request: pytest.FixtureRequest, rank_cases: Mapping[str, Case]) -> Case:
    return rank_cases[request.param]


# -- Megatron


@pytest.fixture(scope="session")
def megatron_folder(checkpoints: Checkpoints) -> Path:
    """A folder with all cases of megatron-core, as its ranks left them."""
    return checkpoints("megatron")


@pytest.fixture(scope="session")
def megatron_cases(megatron_folder: Path) -> dict[str, Case]:
    there = [name for name in megatron_core.CASES if (megatron_folder / name).is_dir()]  # (not all are recorded)
    return {name: megatron_core.load_case(megatron_folder, name, "legacy") for name in there}


@pytest.fixture(scope="session")
def megatron_logits(session_folder: Path, megatron_folder: Path) -> dict[str, dict[str, float]]:
    """How far the logits of the model on one rank are from the parallel model's: kind -> name -> relative distance."""
    return once(session_folder, "megatron_logits", lambda _: megatron_core.logits_alone(megatron_folder))


# one case of each kind of layout, for tests that do not depend on sizes and degrees
MEGATRON_KINDS = ("tp2_gelu_tied", "pp2_vpp2", "tp2_pp2_distopt_tied", "tp2_ep2_etp1", "tp2_dp2_grouped_etp2")


@pytest.fixture(params=MEGATRON_KINDS)
def megatron_kind(request: pytest.FixtureRequest, megatron_cases: dict[str, Case]) -> Case:
    return megatron_cases[request.param]


# -- checkpoints of Orbax


@pytest.fixture(scope="session")
def orbax_cases(checkpoints: Checkpoints) -> Mapping[str, Case]:
    return Cases("orbax", checkpoints("orbax"))


@pytest.fixture(params=orbax_files.CASES)
def orbax_case(request: pytest.FixtureRequest, orbax_cases: Mapping[str, Case]) -> Case:
    return orbax_cases[request.param]


# -- checkpoints of trainers


@pytest.fixture(scope="session")
def trainer_cases(checkpoints: Checkpoints) -> Mapping[str, Case]:
    return Cases("trainers", checkpoints("trainers"))


@pytest.fixture(params=[name for name, spec in trainers.CASES.items() if "open_numbers" not in spec.info])
def trainer_case(request: pytest.FixtureRequest, trainer_cases: Mapping[str, Case]) -> Case:
    return trainer_cases[request.param]


# -- checkpoints of further frameworks


@pytest.fixture(scope="session")
def framework_cases(checkpoints: Checkpoints) -> Mapping[str, Case]:
    return Cases("frameworks", checkpoints("frameworks"))


@pytest.fixture(scope="session")
def verl_cases(checkpoints: Checkpoints) -> Mapping[str, Case]:
    return Cases("verl", checkpoints("verl"))


@pytest.fixture(scope="session")
def folder_cases(checkpoints: Checkpoints) -> Mapping[str, Case]:
    return Cases("run_folders", checkpoints("run_folders"))


@pytest.fixture(params=[*frameworks.CASES, *verl_files.CASES, *run_folders.CASES])
def framework_case(
    request: pytest.FixtureRequest,
    framework_cases: Mapping[str, Case],
    verl_cases: Mapping[str, Case],
    folder_cases: Mapping[str, Case],
) -> Case:
    groups = (framework_cases, verl_cases, folder_cases)
    return next(cases[request.param] for cases in groups if request.param in cases)


# -- DeepSpeed's truth, completed


def complete(case: Case) -> Case:
    """A DeepSpeed case whose truth names all that the checkpoint holds: fp32 as a whole state dict, and Adam's step.

    What has no master copy (buffers, frozen and empty parameters) stands in fp32 as the model states hold it. ZeRO-3
    keeps no 16-bit weights in its files.
    """
    truth = {state: case.truth[state] for state in case.truth}
    weights, tied = truth["weights"], case.info["tied"]
    trained = truth["fp32"].keys()
    untrained = {n: t for n, t in weights.items() if n not in trained and tied.get(n, n) not in trained}
    truth["fp32"] = truth["fp32"] | untrained | {a: truth["fp32"][o] for a, o in tied.items() if o in trained}
    if "exp_avg_sq" in truth:  # Adam's kind
        truth["step"] = {n: torch.tensor(float(case.info["step"])) for n in truth["exp_avg_sq"]}
    if case.info["stage"] == 3:
        del truth["weights"]
    return replace(case, truth=truth)


# -- one case of each kind of placement: spans, chunks, whole tensors


KINDS = {"zero3": "zero3_bf16_dp3", "dcp": "fsdp2_uneven", "safetensors": "llama_sharded"}


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest) -> Case:
    kind = request.param
    cases = {"zero3": "zero_cases", "dcp": "dcp_cases", "safetensors": "huggingface_cases"}[kind]
    found: Case = request.getfixturevalue(cases)[KINDS[kind]]
    return complete(found) if kind == "zero3" else found

"""Checkpoints for the tests: real writers make them, once per session, also where several processes share it."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from filelock import FileLock  # torch depends on it

import lazyckpt

from .writers import Case, megatron_core, rank_files, torch_contents, torch_dcp, torch_files, trainers
from .writers.deepspeed_zero import ZeroSpec, write_many

T = TypeVar("T")


def _cross() -> dict[str, ZeroSpec]:
    """Every stage with every dtype on 1 to 4 ranks, in changing sizes: padding falls differently in each."""
    specs: dict[str, ZeroSpec] = {}
    for stage in (1, 2, 3):
        for dtype in ("fp32", "bf16", "fp16"):
            for dp in (1, 2, 3, 4):
                n = len(specs)
                sizes = {"hidden": (13, 26, 9, 18)[n % 4], "layers": 1 + n % 2, "vocab": (103, 31, 64)[n % 3]}
                specs[f"zero{stage}_{dtype}_dp{dp}"] = ZeroSpec(stage=stage, dtype=dtype, dp=dp, seed=n, **sizes)  # type: ignore[arg-type]
    return specs


ZERO_CROSS = _cross()
ZERO_OPTIONS = {
    "zero1_round_robin": ZeroSpec(stage=1, dp=2, round_robin=True),
    "zero2_round_robin": ZeroSpec(stage=2, dp=3, round_robin=True),
    "zero1_aligned": ZeroSpec(stage=1, dp=3, parameter_alignment=True),
    "zero2_fp32_aligned": ZeroSpec(stage=2, dtype="fp32", dp=2, parameter_alignment=True),
    "zero2_aligned_round_robin": ZeroSpec(stage=2, dp=4, parameter_alignment=True, round_robin=True),
    "zero1_elastic": ZeroSpec(stage=1, dp=2, elastic=True),
    "zero2_elastic": ZeroSpec(stage=2, dp=3, elastic=True),
    "zero3_sub_groups": ZeroSpec(stage=3, dp=2, sub_group_size=300),
    "zero3_fp32_sub_groups": ZeroSpec(stage=3, dtype="fp32", dp=3, sub_group_size=1000),
    "zero1_no_frozen": ZeroSpec(stage=1, dp=2, exclude_frozen=True),
    "zero2_no_frozen": ZeroSpec(stage=2, dp=2, exclude_frozen=True),
    "zero3_no_frozen": ZeroSpec(stage=3, dp=2, exclude_frozen=True),
    "zero1_amsgrad": ZeroSpec(stage=1, dp=2, optimizer="amsgrad"),
    "zero2_fp16_amsgrad": ZeroSpec(stage=2, dtype="fp16", dp=3, optimizer="amsgrad"),
    "zero3_amsgrad": ZeroSpec(stage=3, dp=2, optimizer="amsgrad"),
    "zero1_sgd": ZeroSpec(stage=1, dtype="fp32", dp=2, optimizer="sgd"),
    "zero2_sgd": ZeroSpec(stage=2, dp=2, optimizer="sgd"),
    "zero3_sgd": ZeroSpec(stage=3, dp=3, optimizer="sgd"),
    "zero1_lion": ZeroSpec(stage=1, dp=3, optimizer="lion"),
    "zero2_fp32_lion": ZeroSpec(stage=2, dtype="fp32", dp=2, optimizer="lion"),
    "zero3_lion": ZeroSpec(stage=3, dp=2, optimizer="lion"),
    "zero2_dp11": ZeroSpec(stage=2, dp=11, hidden=9, layers=1, vocab=31),
    "bf16_optimizer_dp1": ZeroSpec(stage=1, dp=1, bf16_optimizer=True),
    "bf16_optimizer_dp3": ZeroSpec(stage=1, dp=3, bf16_optimizer=True),
    "bf16_optimizer_sgd_aligned": ZeroSpec(
        stage=1, dp=4, bf16_optimizer=True, parameter_alignment=True, optimizer="sgd"
    ),
    "zero2_client_state": ZeroSpec(
        stage=2,
        dp=2,
        client_state={"epoch": 7, "note": "ours", "ema": torch.arange(6.0), "nested": {"lr": [0.5, 0.25]}},
    ),
    "zero3_client_state": ZeroSpec(stage=3, dp=2, client_state={"epoch": 8, "ema": torch.arange(5)}),
}
# one of every layout, for what does not depend on sizes and dtypes
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


def once(folder: Path, name: str, write: Callable[[Path], T]) -> T:
    """What ``write`` returns, by the first process of the session that asks; the others wait and get the same."""
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


# -- DeepSpeed


@pytest.fixture(scope="session")
def zero_cases(session_folder: Path) -> dict[str, Case]:
    """All DeepSpeed cases, as their writer left them."""
    need("deepspeed")
    return once(session_folder, "deepspeed", lambda folder: write_many(folder, ZERO_CROSS | ZERO_OPTIONS))


@pytest.fixture(params=sorted(ZERO_CROSS | ZERO_OPTIONS))
def zero_case(request: pytest.FixtureRequest, zero_cases: dict[str, Case]) -> Case:
    return zero_cases[request.param]


@pytest.fixture(params=ZERO_KINDS)
def zero_kind(request: pytest.FixtureRequest, zero_cases: dict[str, Case]) -> Case:
    """One case of each layout."""
    return zero_cases[request.param]


# -- Hugging Face

HUGGINGFACE = ("llama_sharded", "llama_single", "bert", "mixtral", "bin_sharded")


@pytest.fixture(scope="session")
def huggingface_cases(session_folder: Path) -> dict[str, Case]:
    need("transformers")

    def write(folder: Path) -> dict[str, Case]:
        from .writers import huggingface

        return {name: getattr(huggingface, f"write_{name}")(folder / name) for name in HUGGINGFACE}

    return once(session_folder, "huggingface", write)


@pytest.fixture(params=HUGGINGFACE)
def huggingface_case(request: pytest.FixtureRequest, huggingface_cases: dict[str, Case]) -> Case:
    return huggingface_cases[request.param]


# -- files of torch.save


def torch_case(path: Path, tree: Any, more: Mapping[str, torch.Tensor] | None = None) -> Case:
    """The tensors of a saved tree under dotted names; ``more``: those inside objects, which only pickle walks into."""
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
    """What torch.save leaves on a big-endian machine: its byte order in a record, and every element turned round."""
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


@pytest.fixture(scope="session")
def torch_cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {name: write(tmp_path_factory.mktemp(name)) for name, write in TORCH.items()}


@pytest.fixture(params=TORCH)
def torch_save_case(request: pytest.FixtureRequest, torch_cases: dict[str, Case]) -> Case:
    return torch_cases[request.param]


# -- torch.distributed.checkpoint


@pytest.fixture(scope="session")
def dcp_cases(session_folder: Path) -> dict[str, Case]:
    folder = once(session_folder, "dcp", torch_dcp.write_all)
    return {name: torch_dcp.load_case(folder, name) for name in torch_dcp.CASES}


@pytest.fixture(params=[name for name in torch_dcp.CASES if name != "unknown_codec"])
def dcp_case(request: pytest.FixtureRequest, dcp_cases: dict[str, Case]) -> Case:
    return dcp_cases[request.param]


@pytest.fixture
def dcp_hole(dcp_cases: dict[str, Case], tmp_path: Path) -> tuple[lazyckpt.CheckpointView, Case]:
    """A checkpoint of three ranks whose second one has lost its file."""
    case = dcp_cases["fsdp2_uneven"]
    shutil.copytree(case.path, tmp_path / "ckpt")
    (tmp_path / "ckpt" / "__1_0.distcp").unlink()
    return lazyckpt.open(tmp_path / "ckpt"), case


@pytest.fixture(scope="session")
def rank_cases(session_folder: Path) -> dict[str, Case]:
    folder = once(session_folder, "rank_files", rank_files.write_all)
    return {name: rank_files.load_case(folder, name) for name in rank_files.CASES}


@pytest.fixture(params=[name for name in rank_files.CASES if name != "partial"])
def rank_case(request: pytest.FixtureRequest, rank_cases: dict[str, Case]) -> Case:
    return rank_cases[request.param]


# -- Megatron


@pytest.fixture(scope="session")
def megatron_folder(session_folder: Path) -> Path:
    """A folder with all cases of megatron-core, as its ranks left them."""
    need("megatron")
    return once(session_folder, "megatron", megatron_core.write_all)


@pytest.fixture(scope="session")
def megatron_cases(megatron_folder: Path) -> dict[str, Case]:
    return {name: megatron_core.load_case(megatron_folder, name, "legacy") for name in megatron_core.CASES}


# one of every kind of layout, for what does not depend on sizes and degrees
MEGATRON_KINDS = ("tp2_gelu_tied", "pp2_vpp2", "tp2_pp2_distopt_tied", "tp2_ep2_etp1", "tp2_dp2_grouped_etp2")


@pytest.fixture(params=MEGATRON_KINDS)
def megatron_kind(request: pytest.FixtureRequest, megatron_cases: dict[str, Case]) -> Case:
    return megatron_cases[request.param]


# -- what trainers write


class _Written(dict[str, Case]):
    """Cases by name; a test that asks for one whose writer is not installed is skipped."""

    def __missing__(self, name: str) -> Case:
        need(*trainers.CASES[name].needs)
        raise KeyError(name)


@pytest.fixture(scope="session")
def trainer_cases(session_folder: Path) -> dict[str, Case]:
    folder = once(session_folder, "trainers", trainers.write_all)
    return _Written({name: trainers.load_case(folder, name) for name in trainers.CASES if trainers.can_write(name)})


@pytest.fixture(params=[name for name, spec in trainers.CASES.items() if "open_numbers" not in spec.info])
def trainer_case(request: pytest.FixtureRequest, trainer_cases: dict[str, Case]) -> Case:
    return trainer_cases[request.param]


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
        truth["step"] = {n: torch.tensor(float(case.info["step"])) for n in trained}
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

"""What honest checkpoints hold beside tensors: none of it may be called dangerous."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import logging
import pathlib
import pickle
import random
import re
import signal
import types
import typing
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyckpt

from .handmade import call, dict_of, named, number, program, text, write_pickle


class Stage(enum.Enum):
    WEIGHTS = "weights"


class Kind(enum.StrEnum):
    ADAM = "adam"


class Bits(enum.Flag):
    A = enum.auto()
    B = enum.auto()


class Outer:
    class Schedule(enum.Enum):
        COSINE = 1

    class State:
        def __init__(self) -> None:
            self.epoch = 3


class LossScaler:
    """As DeepSpeed and apex save theirs."""

    def __init__(self) -> None:
        self.cur_scale, self.cur_iter, self.dynamic = 65536.0, 12, True


@dataclasses.dataclass(frozen=True)
class ModelArgs:
    dim: int = 64
    kind: Kind = Kind.ADAM
    path: pathlib.PurePath = dataclasses.field(default_factory=lambda: pathlib.PurePosixPath("/data"))


class Slots:
    __slots__ = ("a",)

    def __init__(self) -> None:
        self.a = 1


def warmup(step: int) -> float:
    return min(1.0, step / 100)


def scheduler() -> Any:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10).state_dict()


VALUES: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace(lr=0.1, layers=[1, 2], stage=Stage.WEIGHTS),
    "SimpleNamespace": types.SimpleNamespace(a=1),
    "enum": Stage.WEIGHTS,
    "str enum": Kind.ADAM,
    "flag": Bits.A | Bits.B,
    "nested enum": Outer.Schedule.COSINE,
    "nested class": Outer.State(),
    "signal": [signal.Signals.SIGTERM, signal.SIGUSR1],
    "loss scaler": LossScaler(),
    "dataclass": ModelArgs(),
    "slots": Slots(),
    "function": warmup,
    "partial": functools.partial(warmup, 3),
    "builtin types": [int, float, str, bool, bytes, list, dict, tuple, set, object, type(None), complex, type],
    "builtin functions": [len, sum, max],
    "exceptions": [ValueError("x"), KeyError, RuntimeError("y")],
    "ellipsis": [..., NotImplemented],
    "collections": [collections.OrderedDict(a=1), collections.defaultdict(dict), collections.Counter("ab")],
    "deque": collections.deque([1], maxlen=3),
    "defaultdict of a function": collections.defaultdict(warmup),
    "dates": [datetime.datetime.now(), datetime.datetime.now(datetime.UTC), datetime.timedelta(1), datetime.time(1)],
    "numbers": [decimal.Decimal("1.5"), fractions.Fraction(1, 3), 1j],
    "uuid": uuid.UUID(int=5),
    "pattern": re.compile("a+", re.IGNORECASE),
    "paths": [pathlib.PurePosixPath("/a"), pathlib.PosixPath("b"), pathlib.PureWindowsPath("c")],
    "logging level": logging.INFO,
    "range and slice": [range(5), slice(1, 2)],
    "numpy": [np.arange(3), np.float32(1), np.dtype("f4"), np.array(["a"], object), np.float64, np.ndarray],
    "numpy legacy rng": [np.random.RandomState(1), np.random.get_state()],
    "numpy rng": [np.random.default_rng(1), np.random.PCG64(2), np.random.SeedSequence(3)],
    "python rng": [random.Random(1), random.getstate()],
    "torch values": [torch.float32, torch.Size([1]), torch.device("cuda:0")],
    "torch classes": [torch.nn.Linear, torch.optim.AdamW, torch.nn.functional.gelu],
    "scheduler": scheduler(),
    "typing": [typing.Optional[int], list[int], typing.Any],  # noqa: UP045
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", VALUES)
def test_ordinary_values_are_not_called_dangerous(name: str, protocol: int, tmp_path: Path) -> None:
    if name == "slots" and protocol < 2:
        return  # Python cannot write it
    view = lazyckpt.open(write_pickle(tmp_path / "m.pt", pickle.dumps({"v": VALUES[name]}, protocol)))
    assert not view.problems
    repr(view), repr(view.meta["v"])


def test_a_whole_training_checkpoint(tmp_path: Path) -> None:
    """Model, optimizer, scheduler, scaler, random states, a whole module: with tensors, by torch.save."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.GELU())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    tree = {
        "model": model.state_dict(),
        "module": model,
        "optimizer": optimizer.state_dict(),
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, warmup).state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "rng": {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()},
        "args": VALUES["argparse.Namespace"],
        "everything": {k: v for k, v in VALUES.items() if k != "slots"},
    }
    for name, options in {
        "zip": {},
        "legacy": {"_use_new_zipfile_serialization": False},
        "protocol 5": {"pickle_protocol": 5},
    }.items():
        torch.save(tree, tmp_path / f"{name}.pt", **options)
        view = lazyckpt.open(tmp_path / f"{name}.pt")
        assert not view.problems
        assert torch.equal(view["model.0.weight"][...], model.state_dict()["0.weight"])


# globals as real trainers write them, from packages that are not installed here
FOREIGN = """
    mmengine.logging.history_buffer HistoryBuffer
    mmcv.runner.log_buffer LogBuffer
    lightning.pytorch.utilities.types STEP_OUTPUT
    pytorch_lightning.callbacks.model_checkpoint ModelCheckpoint
    pytorch_lightning.loggers.tensorboard TensorBoardLogger
    omegaconf.dictconfig DictConfig
    omegaconf.base ContainerMetadata
    megatron.core.enums ModelType
    megatron.core.rerun_state_machine RerunDiagnostic
    megatron.training.arguments Namespace
    megatron.core.transformer.enums AttnBackend
    deepspeed.runtime.fp16.loss_scaler DynamicLossScaler
    deepspeed.runtime.zero.config ZeroStageEnum
    deepspeed.utils.tensor_fragment fragment_address
    apex.fp16_utils.loss_scaler LossScaler
    fairseq.data.dictionary Dictionary
    fairseq.tasks.language_modeling LanguageModelingTask
    transformers.training_args TrainingArguments
    transformers.trainer_utils IntervalStrategy
    transformers.integrations.deepspeed HfTrainerDeepSpeedConfig
    accelerate.state PartialState
    accelerate.utils.dataclasses DistributedType
    torch.distributed.fsdp.api ShardingStrategy
    torch.distributed._shard.sharded_tensor.api ShardedTensor
    torch.distributed.remote_device _remote_device
    torch.distributed.checkpoint.metadata Metadata
    torch.distributed.tensor._dtensor_spec DTensorSpec
    torch.utils.data.sampler RandomSampler
    torch._C Generator
    torch.torch_version TorchVersion
    torchao.dtypes.affine_quantized_tensor AffineQuantizedTensor
    bitsandbytes.nn.modules Params4bit
    ultralytics.nn.tasks DetectionModel
    models.yolo Model
    utils.autoanchor Anchors
    detectron2.utils.events EventStorage
    timm.utils.model_ema ModelEma
    gym.spaces.box Box
    stable_baselines3.common.running_mean_std RunningMeanStd
    sklearn.preprocessing._data StandardScaler
    pandas._libs.internals _unpickle_block
    mypackage.types Config
    mypackage.code.model Model
    mypackage.io Reader
    mypackage.os Settings
    my.trace.profile.platform.http Thing
    __main__ Args
"""


@pytest.mark.parametrize("line", FOREIGN.strip().splitlines(), ids=str.strip)
def test_foreign_classes_are_not_called_dangerous(line: str, tmp_path: Path) -> None:
    module, name = line.split()
    body = dict_of(text("a"), call(named(module, name), number(1)), text("b"), named(module, name))
    view = lazyckpt.open(write_pickle(tmp_path / "m.pt", program(body)))
    assert not view.problems
    assert (view.meta["a"].module, view.meta["a"].name) == (module, name)


def test_in_memory_streams_are_harmless(tmp_path: Path) -> None:
    """What get_extra_state of TransformerEngine's modules returns."""
    torch.save(
        {"w": torch.ones(2), "layer._extra_state": io.BytesIO(b"abc"), "text": io.StringIO("x")}, tmp_path / "a.pt"
    )
    view = lazyckpt.open(tmp_path / "a.pt")
    assert list(view) == ["w"] and not view.problems
    assert "BytesIO" in repr(view.meta["layer._extra_state"])


def test_thousands_of_equal_frozensets_are_ordinary(tmp_path: Path) -> None:
    path = tmp_path / "sets.pt"
    torch.save({"seen": [frozenset((1.5, (n % 3, 2))) for n in range(5_000)]}, path, pickle_protocol=4)
    assert len(lazyckpt.open(path).meta["seen"]) == 5_000

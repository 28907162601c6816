"""Programs that torch saves with their weights: TorchScript, torch.export, packages of AOTInductor.

``write_all`` writes a folder for each case: ``ckpt`` with the file, and ``truth.pt`` with what the process held, by
state. Two cases are of older versions of torch, whose files today's torch only reads: they are written as its sources
did, from what `serialize` makes today.
"""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import Case

Truth = dict[str, dict[str, torch.Tensor]]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("passing", torch.arange(3.0), persistent=False)
        self.table = torch.arange(6).reshape(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.passing  # type: ignore[operator]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Inner(), Inner()
        self.b.linear.weight = self.a.linear.weight
        self.norm = nn.BatchNorm1d(3)
        self.layers = nn.ModuleList([nn.Linear(3, 3).to(torch.bfloat16), nn.Linear(3, 3, bias=False)])
        self.parts = [torch.ones(2), torch.zeros(3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(x) + self.b(x)) + torch.tensor([1.0, 2.0, 3.0])  # type: ignore[no-any-return]


class Views(nn.Module):
    """Parameters and buffers that are views, tied, transposed, empty, and of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        both = torch.arange(10.0)
        self.left, self.right = nn.Parameter(both[:4]), nn.Parameter(both[4:])
        self.turned = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
        self.gain = nn.Parameter(torch.tensor(2.5, dtype=torch.bfloat16))
        self.register_buffer("small", torch.arange(8.0).to(torch.float8_e4m3fn))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("waves", torch.view_as_complex(torch.randn(3, 2)))
        self.register_buffer("empty", torch.zeros(0, 3, dtype=torch.int64))
        self.register_buffer("passing", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x) * self.left + self.passing  # type: ignore[operator]
        return self.head(hidden) * self.gain.float() + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])  # type: ignore[no-any-return]


def _scripted(trace: bool = False) -> Any:
    module = Outer().eval()
    return torch.jit.trace(module, torch.ones(2, 4)) if trace else torch.jit.script(module)


def _script(folder: Path) -> tuple[Truth, dict[str, Any]]:
    script = _scripted()
    torch.jit.save(script, folder / "model.pt")
    table = torch.arange(6).reshape(2, 3)
    others = {"a.table": table, "b.table": table, "parts.0": torch.ones(2), "parts.1": torch.zeros(3)}
    return {"weights": dict(script.state_dict()), "attributes": others}, {
        "tied": {"b.linear.weight": "a.linear.weight"}
    }


def _trace(folder: Path) -> tuple[Truth, dict[str, Any]]:
    script = _scripted(trace=True)
    torch.jit.save(script, folder / "model.pt")
    constants = {"0": torch.tensor([1.0, 2.0, 3.0])}
    return {"weights": dict(script.state_dict()), "constants": constants}, {
        "tied": {"b.linear.weight": "a.linear.weight"}
    }


def _quantized(folder: Path) -> tuple[Truth, dict[str, Any]]:
    module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 2)))
    torch.jit.save(torch.jit.script(module), folder / "model.pt")
    weight, bias = module.state_dict()["0._packed_params._packed_params"]
    prefix = "0._packed_params._packed_params"
    return {"weights": {f"{prefix}.0": weight.int_repr(), f"{prefix}.1": bias.detach()}}, {}


def _exported() -> tuple[Any, Truth, dict[str, Any]]:
    module = Views()
    program = torch.export.export(module, (torch.tensor([1, 2]),))
    constants = {name: t for name, t in program.constants.items() if isinstance(t, torch.Tensor)}
    truth = {"weights": dict(module.state_dict()), "constants": constants}
    return program, truth, {"tied": {"head.weight": "embed.weight"}}


def _export(folder: Path) -> tuple[Truth, dict[str, Any]]:
    program, truth, info = _exported()
    torch.export.save(program, folder / "program.pt2", extra_files={"notes.txt": "text"})
    return truth, info


def _export_2_8(folder: Path) -> tuple[Truth, dict[str, Any]]:
    """As torch 2.8 did: torch/export/pt2_archive/_package.py `_package_exported_programs` there."""
    from torch._export.serde.serialize import serialize
    from torch.export.pt2_archive._package import PT2ArchiveWriter

    program, truth, info = _exported()
    made = serialize(program)
    with PT2ArchiveWriter(str(folder / "program.pt2")) as writer:
        writer.write_bytes("models/model.json", made.exported_program)
        writer.write_bytes("data/weights/model.pt", made.state_dict)
        writer.write_bytes("data/constants/model.pt", made.constants)
        writer.write_bytes("data/sample_inputs/model.pt", made.example_inputs)
    return truth, info


def _export_2_7(folder: Path) -> tuple[Truth, dict[str, Any]]:
    """As torch 2.2 to 2.7 did: torch/export/__init__.py `save` there."""
    from torch._export.serde.schema import SCHEMA_VERSION
    from torch._export.serde.serialize import serialize

    program, truth, info = _exported()
    made = serialize(program)
    with zipfile.ZipFile(folder / "program.pt2", "w") as archive:
        archive.writestr("serialized_exported_program.json", made.exported_program)
        archive.writestr("serialized_state_dict.pt", made.state_dict)
        archive.writestr("serialized_constants.pt", made.constants)
        archive.writestr("serialized_example_inputs.pt", made.example_inputs)
        archive.writestr("version", ".".join(map(str, SCHEMA_VERSION)))
        archive.writestr("extra_files/notes.txt", b"text")
    return truth, info


def _aoti(folder: Path) -> tuple[Truth, dict[str, Any]]:
    """The packaging of AOTInductor, with a text in the place of the compiled library; two models share weights."""
    from torch.export.pt2_archive._package import package_pt2
    from torch.export.pt2_archive._package_weights import TensorProperties, Weights

    held = {name: t.detach() for name, t in Views().state_dict().items()}
    models = {"first": held, "second": {"w": held["embed.weight"], "turned": held["turned"]}}
    library = folder / "abc.wrapper.cpp"
    library.write_text("// compiled")
    files: dict[str, list[Any]] = {
        name: [str(library), Weights({key: (t, TensorProperties(t)) for key, t in weights.items()})]
        for name, weights in models.items()
    }
    package_pt2(str(folder / "package.pt2"), aoti_files=files)
    library.unlink()
    truth = {f"{name}.{key}": t for name, weights in models.items() for key, t in weights.items()}
    tied = {
        "first.head.weight": "first.embed.weight",
        "second.w": "first.embed.weight",
        "second.turned": "first.turned",
    }
    return {"weights": truth}, {"tied": tied}


def _without_paths(path: Path) -> None:
    """Copy an archive without the folders of the machine that wrote it: torch records where each line of code was."""
    with zipfile.ZipFile(path) as archive:
        folder = "/" in archive.namelist()[0]
        records = {name.partition("/")[2] if folder else name: archive.read(name) for name in archive.namelist()}
    for root in (Path(torch.__file__).parents[1], Path(__file__).parents[2]):
        records = {
            name: data.replace(f"{root}/".encode(), b"") if name.endswith(".json") else data
            for name, data in records.items()
            if not name.endswith(".debug_pkl")
        }
    path.unlink()
    if not folder:
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in records.items():
                archive.writestr(name, data)
        return
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, data in records.items():
        if name not in ("version", ".data/version", ".data/serialization_id"):  # which the writer adds
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()


CASES: dict[str, Callable[[Path], tuple[Truth, dict[str, Any]]]] = {
    "script": _script,
    "trace": _trace,
    "script_quantized": _quantized,
    "export": _export,
    "export_2_8": _export_2_8,
    "export_2_7": _export_2_7,
    "aoti": _aoti,
}


def write_all(folder: Path) -> None:
    """Write all cases."""
    for name, write in CASES.items():
        (folder / name / "ckpt").mkdir(parents=True)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated; weights without a whole tensor
            truth, info = write(folder / name / "ckpt")
        for path in (folder / name / "ckpt").iterdir():
            _without_paths(path)
        whole = {state: {key: t.detach().clone() for key, t in held.items()} for state, held in truth.items()}
        torch.save(whole, folder / name / "truth.pt")
        (folder / name / "info.json").write_text(json.dumps(info))


def load_case(folder: Path, name: str) -> Case:
    """Load a case of `write_all`."""
    (path,) = (folder / name / "ckpt").iterdir()
    info = json.loads((folder / name / "info.json").read_text())
    return Case(path, torch.load(folder / name / "truth.pt", weights_only=True), info)

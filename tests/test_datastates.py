"""Files that DataStates-LLM writes in place of torch.save's, written as its source does (it needs a GPU)."""

from __future__ import annotations

import copyreg
import json
import pickle
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.errors import CorruptError, FormatError, LazyckptError
from lazyckpt.testing import opened
from lazyckpt.testing.oracle import same

from .writers import Case

ALIGNED = 4096


def write(state: dict[str, Any], path: Path, aligned: bool) -> None:
    """`save_background` (2024), `SimpleCheckpointEngine.save_` (2025, aligned)."""
    header: dict[str, Any] = {}
    blocks: list[tuple[int, torch.Tensor]] = []
    start = end = 0
    offsets = "offsets" if aligned else "data_offsets"

    def up(offset: int) -> int:
        return -(-offset // ALIGNED) * ALIGNED if aligned else offset

    def parse(key: str, data: Any) -> Any:
        nonlocal start, end
        if torch.is_tensor(data):
            end += data.numel() * data.element_size()
            header[key] = {"dtype": str(data.dtype), "shape": tuple(data.shape), offsets: [start, end]}
            blocks.append((start, data.contiguous()))
            if aligned:
                header[key][offsets][1] = start + data.numel() * data.element_size()
                end = header[key][offsets][1]
            start = up(end)
            return f"TENSOR|{key}"
        if isinstance(data, list):
            return [parse(f"{key}|{n}" if key else f"{n}", one) for n, one in enumerate(data)]
        if isinstance(data, dict):
            return {k: parse(f"{key}|{k}" if key else f"{k}", one) for k, one in data.items()}
        return data

    lean = pickle.dumps(parse("", state), protocol=pickle.HIGHEST_PROTOCOL)
    header["datastates_metadata"] = {offsets: [start, end + up(len(lean))]}
    text = json.dumps(header).encode()
    before = up(8) + up(len(text))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.seek(up(8))
        file.write(text)
        file.seek(start + before)
        file.write(lean)
        for at, tensor in blocks:
            file.seek(before + at)
            file.write(tensor.view(-1).view(torch.uint8).numpy().tobytes())


STATE: dict[str, Any] = {
    "module": {
        "a.weight": torch.arange(15.0).view(3, 5) / 7,
        "a.bias": torch.arange(4.0).bfloat16(),
        "n": torch.tensor(7),
    },
    "optimizer": {
        "state": {0: {"exp_avg": torch.arange(15.0).view(3, 5)}, 1: {"exp_avg": torch.arange(4.0)}},
        "param_groups": [{"lr": 0.5, "params": [0, 1]}],
    },
    "list": [torch.ones(2), {"deep": torch.zeros(1)}, "text"],
    "step": 9,
}


@pytest.mark.parametrize("aligned", [False, True])
def test_tensors_and_objects(tmp_path: Path, aligned: bool) -> None:
    write(STATE, tmp_path / "model.pt", aligned)
    view, counts = opened(tmp_path / "model.pt")
    assert list(view) == ["a.weight", "a.bias", "n"] and view.meta["step"] == 9
    counts.clear()
    same(view["a.weight"][1], STATE["module"]["a.weight"][1], "a row")
    assert counts.bytes == 20
    for name, tensor in STATE["module"].items():
        same(view[name][...], tensor, name)
    same(view.states["exp_avg"]["a.bias"][...], STATE["optimizer"]["state"][1]["exp_avg"], "exp_avg")
    same(view.stored["list.1.deep"][...], torch.zeros(1), "deep")


@pytest.mark.parametrize("aligned", [False, True])
def test_tensors_in_tuples_are_in_the_pickle(tmp_path: Path, aligned: bool) -> None:
    """The writer looks into dicts and lists only, so that pickle writes what is in a tuple itself."""
    base = torch.arange(12.0).view(3, 4)
    inner = (base.t(), base[1], "text", torch.tensor([2.5, -1.0]).bfloat16())
    write(
        {"module": {"a.weight": torch.ones(3)}, "pair": inner, "list": [(torch.tensor(5),)]}, tmp_path / "m.pt", aligned
    )
    view = lazyckpt.open(tmp_path / "m.pt")
    assert view.problems == () and list(view) == ["a.weight"] and view.meta["pair"][2] == "text"
    for n in (0, 1, 3):
        same(view.stored[f"pair.{n}"][...], inner[n], n)
    same(view.stored["list.0.0"][...], torch.tensor(5), "in a list")


def test_a_pickle_in_place_of_a_storage_stays_a_record(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return torch.storage._load_from_bytes, (pickle.dumps(STATE["step"]),)  # type: ignore[attr-defined]

    write({"module": {"a.weight": torch.ones(3)}, "pair": (Evil(),)}, tmp_path / "m.pt", False)
    view = lazyckpt.open(tmp_path / "m.pt")
    assert [problem.code for problem in view.problems] == ["unsafe-pickle"]
    assert "_load_from_bytes" in repr(view.meta["pair"][0])


@pytest.mark.parametrize("name", ['a"b', "ü", "a\\"])
def test_the_first_name_may_have_escapes(tmp_path: Path, name: str) -> None:
    write({name: torch.ones(2)}, tmp_path / "model.pt", False)
    same(lazyckpt.open(tmp_path / "model.pt")[name][...], torch.ones(2), name)


class _Loader(pickle.Unpickler):
    """Loads what DeepSpeed saved without DeepSpeed, whose import takes seconds: its objects are inert."""

    patch: pytest.MonkeyPatch

    def find_class(self, module: str, name: str) -> Any:
        if not module.startswith("deepspeed"):
            return super().find_class(module, name)

        def init(self: Any, *args: Any) -> None:
            self.args = args

        def reduce(self: Any, protocol: int) -> Any:
            made = (type(self), self.args) if self.args else (copyreg.__newobj__, (type(self),))  # type: ignore[attr-defined]
            return made if self.state is None else (*made, self.state)

        for name_of in (module.partition(".")[0], module):
            if not isinstance(sys.modules.get(name_of), _Inert):
                self.patch.setitem(sys.modules, name_of, _Inert(name_of))
        kept = vars(sys.modules[module])
        methods: dict[str, Any] = {
            "__init__": init,
            "__reduce_ex__": reduce,
            "__module__": module,
            "args": (),
            "state": None,
        }
        methods["__setstate__"] = lambda self, state: setattr(self, "state", state)
        return kept.setdefault(name, type(name, (), methods))


class _Inert(types.ModuleType):
    pass


@pytest.mark.parametrize(("name", "aligned"), [("zero2_aligned_round_robin", False), ("zero3_sub_groups", True)])
def test_deepspeed_with_its_files(
    zero_cases: Mapping[str, Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, aligned: bool
) -> None:
    case = zero_cases[name]
    _Loader.patch = monkeypatch
    module = types.SimpleNamespace(Unpickler=_Loader, load=pickle.load, __name__="inert")
    for path in sorted(case.path.rglob("*")):
        to = tmp_path / path.relative_to(case.path)
        if path.is_dir():
            to.mkdir(exist_ok=True)
        elif path.suffix == ".pt":
            write(torch.load(path, weights_only=False, pickle_module=module), to, aligned)
        else:
            to.write_bytes(path.read_bytes())
    view, like = lazyckpt.open(tmp_path), lazyckpt.open(case.path)
    # (buffers of other ranks are compared by checksums, which these files do not have)
    assert list(view.problems) == [p for p in like.problems if p.code != "differing-replicas"]
    assert list(view.states) == list(like.states)
    for state in case.truth.keys() & like.states.keys():
        for name, tensor in case.truth[state].items():
            same(view.states[state][name][...], tensor, (state, name))


def test_placeholders_of_nebula_are_named(tmp_path: Path) -> None:
    """deepspeed/runtime/checkpoint_engine/nebula_checkpoint_engine.py `save`: ``torch.save("", path)``."""
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        (tmp_path / "global_step3").mkdir(exist_ok=True)
        torch.save("", tmp_path / "global_step3" / name)
    (tmp_path / "latest").write_text("global_step3")
    with pytest.raises(FormatError, match="Nebula"):
        lazyckpt.open(tmp_path)


def test_the_pickle_is_scanned(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return eval, ("1",)

    for aligned in (False, True):
        write({"w": torch.ones(2), "harm": Harm()}, tmp_path / f"{aligned}.pt", aligned)
        assert lazyckpt.scan(tmp_path / f"{aligned}.pt").worst == "error"
        assert any(p.code == "unsafe-pickle" for p in lazyckpt.open(tmp_path / f"{aligned}.pt").problems)
    write(STATE, tmp_path / "harmless.pt", False)
    assert lazyckpt.scan(tmp_path / "harmless.pt").worst is None


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return changed


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-30],
    "without its pickle": lambda data: data[: data.rindex(b"\x80\x05")],
    "beyond the end": _header(lambda h: h["module|n"].update(data_offsets=[1 << 40, (1 << 40) + 8])),
    "another size": _header(lambda h: h["module|n"].update(shape=[2])),
    "a huge shape": _header(lambda h: h["module|n"].update(shape=[1 << 40, 1 << 40])),
    "no dtype": _header(lambda h: h["module|n"].pop("dtype")),
    "no place": _header(lambda h: h["module|n"].pop("data_offsets")),
    "no metadata": _header(lambda h: h.pop("datastates_metadata")),
    "a tensor less": _header(lambda h: h.pop("module|n")),
    "a tensor more": _header(lambda h: h.update({"more": h["module|n"]})),
    "no JSON": lambda data: data[:40] + b"{" + data[41:],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.pt"
    write(STATE, path, False)
    path.write_bytes(DAMAGE[name](path.read_bytes()))
    with pytest.raises(LazyckptError) as raised:
        lazyckpt.open(path)
    assert isinstance(raised.value, CorruptError)

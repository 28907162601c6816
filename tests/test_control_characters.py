"""No name out of a file reaches a terminal with escape codes, line breaks or marks that reverse the reading direction.

JSON escapes by itself, and the names as data stay exact.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import LazyckptError, cli

HOSTILE = "\x1b[31mred\x07\nnext\r\x9b2J\u202eback\u2066\u2069\x7f"
_BIDI = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F}


def bad(text: str, lines: bool = True) -> list[str]:
    """The characters that a terminal would act upon."""
    return [c for c in text if (ord(c) < 32 and not (lines and c == "\n")) or 0x7F <= ord(c) < 0xA0 or ord(c) in _BIDI]


def clean(text: str) -> None:
    assert not bad(text), ascii(text)
    assert not any(line.startswith("next") for line in text.split("\n")), "a name has broken a line"


def _torch(folder: Path) -> Path:
    torch.save(
        {HOSTILE: torch.ones(2), "meta" + HOSTILE: [HOSTILE], "model": {HOSTILE: torch.ones(3)}}, folder / "x.pt"
    )
    return folder / "x.pt"


def _optimizer(folder: Path) -> Path:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0][HOSTILE] = torch.ones(3)
    torch.save({"model": {HOSTILE: weight.data, "w": torch.ones(3)}, "optimizer": state}, folder / "x.pt")
    return folder / "x.pt"


def _safetensors(folder: Path) -> Path:
    save_file({HOSTILE: torch.ones(2)}, folder / "x.safetensors", {HOSTILE: HOSTILE})
    return folder / "x.safetensors"


def _index(folder: Path) -> Path:
    save_file({HOSTILE: torch.ones(2), f"extra{HOSTILE}": torch.ones(1)}, folder / "a.safetensors")
    weights = {HOSTILE: "a.safetensors", f"lost{HOSTILE}": "a.safetensors", f"gone{HOSTILE}": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (folder / "config.json").write_text(json.dumps({"architectures": [HOSTILE], "tie_word_embeddings": True}))
    return folder


def _dcp(folder: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({HOSTILE: torch.ones(2), "note": HOSTILE}, checkpoint_id=folder / "c", no_dist=True)
    (folder / "c" / f"left{HOSTILE}.distcp").write_bytes(b"of another save")
    return folder / "c"


def _zarr(folder: Path) -> Path:
    lazyckpt.open(_torch(folder)).to_zarr(folder / "x.zarr")
    return folder / "x.zarr"


def _ranks(folder: Path) -> Path:
    for rank in (0, 1):
        torch.save({HOSTILE: torch.ones(2)}, folder / f"model_world_size_3_rank_{rank}.pt")
    torch.save({}, folder / "extra_state_world_size_2_rank_0.pt")
    return folder


def _folder(folder: Path) -> Path:
    where = folder / f"in{HOSTILE}"
    where.mkdir()
    return _torch(where)


WRITERS = (_torch, _optimizer, _safetensors, _index, _dcp, _zarr, _ranks, _folder)


@pytest.fixture(params=WRITERS, ids=lambda writer: writer.__name__.strip("_"))
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    made: Path = request.param(tmp_path)
    return made


def texts(view: lazyckpt.CheckpointView) -> Iterator[str]:
    yield from view.problems
    yield from (ascii(name) + why for name, why in view.unreadable.items())
    yield repr(view)
    yield view.explain()
    yield view.tree()
    yield repr(view.stats())
    yield str(view.states)
    for name, t in view.items():
        yield from (repr(t), t.explain())
        assert view[name] is not None
    for name in (HOSTILE + "no", *view.unreadable):
        with pytest.raises(LazyckptError) as error:
            view[name]
        yield str(error.value)


def test_nothing_that_people_read_has_control_characters(path: Path) -> None:
    view = lazyckpt.open(path, cache=False)
    for text in texts(view):
        clean(text)
    for state in view.states.values():
        clean(repr(state) + state.explain())
    clean(view._repr_html_())
    clean(repr(lazyckpt.diff(view, view.stored)))


def test_names_as_data_stay_exact(tmp_path: Path) -> None:
    assert HOSTILE in lazyckpt.open(_safetensors(tmp_path))
    done = CliRunner().invoke(cli.app, ["ls", str(tmp_path / "x.safetensors"), "--json"])
    assert json.loads(done.stdout)["tensors"][0]["name"] == HOSTILE


@pytest.mark.parametrize("command", [["ls"], ["stats"], ["stats", "--csv"], ["show", "nothing"], ["ls", "nothing"]])
def test_the_command_line(path: Path, command: list[str]) -> None:
    name, *rest = command
    done = CliRunner().invoke(cli.app, [name, str(path), *rest])
    clean(done.stdout + done.stderr)


_MISTAKES: dict[str, Callable[[Path], object]] = {
    "a path": lambda folder: lazyckpt.open(folder / HOSTILE),
    "a folder": lambda folder: lazyckpt.open(folder),
    "a tag": lambda folder: lazyckpt.open(folder, tag=HOSTILE),
    "a format": lambda folder: lazyckpt.open(folder, format=HOSTILE),
    "a run": lambda folder: lazyckpt.open_run(folder / HOSTILE),
}


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_error_texts(tmp_path: Path, mistake: str) -> None:
    (tmp_path / HOSTILE).write_bytes(b"no checkpoint")
    with pytest.raises(LazyckptError) as error:
        _MISTAKES[mistake](tmp_path)
    text = str(error.value)
    assert not bad(text, lines=False), ascii(text)

"""Which reader reads a path: the first that recognises it, the one that is named, or one of another package."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.formats import reader, registry
from lazyckpt.testing.oracle import same

_PLUGIN = """
from lazyckpt.core.extents import Extent
from lazyckpt.core.index import Index
from lazyckpt.core.specs import whole
from lazyckpt.formats.reader import Reader
import torch


def recognises(source):
    return source.head.startswith(b"ACME") or source.path.endswith(".pt")


def read(source):
    info = source.store.stat(source.path)
    extent = Extent(source.path, 4, torch.int16, ((info.size - 4) // 2,), (1,))
    index = {"acme.w": whole("acme.w", extent)}
    return Index("acme", {"weights": index}, {source.path: info}, stored=index, meta={"rules": dict(source.rules)})


READER = Reader("acme", "files of the Acme corporation", recognises, read)
"""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that only an installed package's reader knows, with that package on the path."""
    site = tmp_path / "site"
    info = site / "acme_reader-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "acme_reader.py").write_text(_PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-reader\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{reader.GROUP}]\nacme = acme_reader:READER\n")
    monkeypatch.syspath_prepend(str(site))
    path = tmp_path / "weights.acme"
    path.write_bytes(b"ACME" + torch.arange(10, dtype=torch.int16).numpy().tobytes())
    return path


def test_the_group_is_the_documented_one() -> None:
    assert reader.GROUP == "lazyckpt.readers"


def test_an_installed_reader_is_asked(acme: Path) -> None:
    view = lazyckpt.open(acme, rules={"a": 1})
    assert (view.format, dict(view.meta)) == ("acme", {"rules": {"a": 1}})
    same(view["acme.w"][2:5], torch.tensor([2, 3, 4], dtype=torch.int16), "acme")
    assert lazyckpt.open(acme, format="acme").format == "acme"


def test_a_reader_that_is_installed_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages are listed once for many folders, and anew when one is installed."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    listed: list[str] = []

    def counted(group: str) -> EntryPoints:
        listed.append(group)
        return entry_points(group=group)

    monkeypatch.setattr(registry, "entry_points", counted)
    path = tmp_path / "weights.late"
    path.write_bytes(b"LATE" + bytes(20))
    for _ in range(5):
        with pytest.raises(lazyckpt.FormatError):
            lazyckpt.open(path)
    assert listed == [reader.GROUP]
    before = site.stat().st_mtime_ns
    info = site / "late_reader-1.0.dist-info"
    info.mkdir()
    (site / "late_reader.py").write_text(_PLUGIN.replace("ACME", "LATE"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: late-reader\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{reader.GROUP}]\nlate = late_reader:READER\n")
    os.utime(site, ns=(before + 10**9,) * 2)  # however coarse the clocks of the file system and of importlib are
    assert list(lazyckpt.open(path)) == ["acme.w"]
    assert listed == [reader.GROUP] * 2


def test_without_it_the_file_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "weights.acme").write_bytes(b"ACME" + bytes(20))
    with pytest.raises(lazyckpt.FormatError) as error:
        lazyckpt.open(tmp_path / "weights.acme")
    assert "weights.acme" in str(error.value) and "ACME" in str(error.value) and len(str(error.value)) < 300


def test_built_in_readers_come_first(acme: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "x.pt")  # the plugin claims .pt
    assert lazyckpt.open(tmp_path / "x.pt").format == "torch"
    assert lazyckpt.open(tmp_path / "x.pt", format="acme").format == "acme", "unless it is asked for"


def test_a_reader_by_name(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3)}, tmp_path / "x.pt")
    save_file({"w": torch.arange(4)}, tmp_path / "y.safetensors")
    assert lazyckpt.open(tmp_path / "x.pt", format="torch").format == "torch"
    assert lazyckpt.open(tmp_path / "y.safetensors", format="safetensors").format == "safetensors"
    assert lazyckpt.open(tmp_path / "y.safetensors", format="safetensors")["w"].shape == (4,)


@pytest.mark.parametrize("wrong", ["safetensors", "deepspeed"])
def test_the_wrong_reader_says_so(tmp_path: Path, wrong: str) -> None:
    torch.save({"w": torch.arange(3)}, tmp_path / "x.pt")
    with pytest.raises(lazyckpt.LazyckptError) as error:
        lazyckpt.open(tmp_path / "x.pt", format=wrong)
    assert "x.pt" in str(error.value)


@pytest.mark.parametrize(("wrong", "meant"), [("deepsped", "deepspeed"), ("acne", "acme"), ("onnx", "")])
def test_an_unknown_reader_name_leads_to_those_there_are(tmp_path: Path, acme: Path, wrong: str, meant: str) -> None:
    torch.save({"w": torch.arange(3)}, tmp_path / "x.pt")
    with pytest.raises(lazyckpt.FormatError) as error:
        lazyckpt.open(tmp_path / "x.pt", format=wrong)
    assert all(part in str(error.value) for part in (repr(wrong), meant, "lazyckpt formats"))


def test_folders_that_hold_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(lazyckpt.FormatError, match="empty folder"):
        lazyckpt.open(tmp_path / "empty")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("nothing")
    with pytest.raises(lazyckpt.FormatError, match=r"notes\.txt"):
        lazyckpt.open(tmp_path / "other")


def test_a_file_of_the_name_that_another_writer_uses(tmp_path: Path) -> None:
    """metadata.json is megatron-core's, but also what people call a file of their own."""
    save_file({"up.weight": torch.arange(6.0).view(2, 3)}, tmp_path / "model.safetensors")
    for content in ('{"author": "me"}', "no JSON", ""):
        (tmp_path / "metadata.json").write_text(content)
        view = lazyckpt.open(tmp_path)
        assert view.format == "huggingface" and list(view) == ["up.weight"]


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(lazyckpt.MissingFileError) as error:
        lazyckpt.open(tmp_path / "nowhere.pt")
    assert isinstance(error.value, FileNotFoundError) and "nowhere.pt" in str(error.value)


def test_one_error_tree() -> None:
    kinds = {
        lazyckpt.FormatError: ValueError,
        lazyckpt.CorruptError: ValueError,
        lazyckpt.MissingFileError: FileNotFoundError,
        lazyckpt.ChangedFileError: OSError,
        lazyckpt.TensorNotFoundError: KeyError,
        lazyckpt.SelectionError: IndexError,
        lazyckpt.DataError: RuntimeError,
    }
    for kind, builtin in kinds.items():
        assert issubclass(kind, lazyckpt.LazyckptError) and issubclass(kind, builtin)
        assert str(kind("a sentence")) == "a sentence"


def test_a_folder_one_level_too_high_names_what_can_be_opened(tmp_path: Path) -> None:
    for folder in ("model", "run/checkpoint-5", "notes"):
        (tmp_path / folder).mkdir(parents=True)
    for folder in ("model", "run/checkpoint-5"):
        save_file({"w": torch.ones(2)}, tmp_path / folder / "model.safetensors")
    (tmp_path / "notes" / "todo.txt").write_text("nothing")
    with pytest.raises(lazyckpt.FormatError) as e:
        lazyckpt.open(tmp_path)
    assert str(e.value) == f"{tmp_path} is no checkpoint itself. Open one of those in it: model, run"
    for folder in ("model", "run"):
        assert list(lazyckpt.open(tmp_path / folder)) == ["w"]
    with pytest.raises(lazyckpt.FormatError, match=r"knows: it has todo.txt\. "):
        lazyckpt.open(tmp_path / "notes")


def test_a_tag_is_text(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="tag=5: the name of a checkpoint is due"):
        lazyckpt.open(tmp_path, tag=5)  # type: ignore[arg-type]


def test_a_reader_that_is_named_for_anothers_file_says_whose_it_is(tmp_path: Path) -> None:
    """Else the reader of Zarr finds no arrays in a zip of torch.save, and shows an empty checkpoint."""
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    save_file({"w": torch.ones(2)}, tmp_path / "y.safetensors")
    for name, formats in (("x.pt", ("zarr", "safetensors", "dcp")), ("y.safetensors", ("torch", "zarr"))):
        for given in formats:
            with pytest.raises(lazyckpt.FormatError, match=name):
                lazyckpt.open(tmp_path / name, format=given)


def test_paths_of_bytes(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    assert list(lazyckpt.open(bytes(tmp_path / "x.pt"))) == ["w"]  # type: ignore[arg-type]


def test_rules_that_no_reader_asks_for_are_a_problem(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "y.safetensors")
    view = lazyckpt.open(tmp_path / "y.safetensors", rules={"w": "row"})
    assert any("rules" in line for line in view.problems)
    assert not lazyckpt.open(tmp_path / "y.safetensors").problems

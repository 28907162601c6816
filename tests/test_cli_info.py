"""`lazyckpt info`, the short form of `ls`, globs as arguments, and -h."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lazyckpt import cli
from lazyckpt.show.about import loss_of, meta_lines


class Thing:
    def __init__(self) -> None:
        self.rate = 0.5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    weights = {f"layers.{n}.{part}.weight": torch.ones(2, 3) for n in range(3) for part in ("up", "down")}
    state = {
        "model": weights,
        "global_step": 700,
        "args": {"lr": 1e-4, "betas": (0.9, 0.999), "deep": {"er": {"lowest": 1}}, "\x1b[31mred": "a\nb"},
        "history": [{"loss": 3.5}, {"loss": 2.25}],
        "thing": Thing(),
    }
    torch.save(state, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def run(*args: Any) -> str:
    done = CliRunner().invoke(cli.app, [str(arg) for arg in args])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_info_shows_facts_and_metadata(path: Path) -> None:
    text = run("info", path)
    facts = dict(line.split(maxsplit=1) for line in text.partition("\n\n")[0].splitlines())
    assert facts["step"] == "700" and facts["loss"].startswith("2.25 ") and facts["format"] == "torch"
    assert "lr: 0.0001" in text and "betas: [0.9, 0.999]" in text and "<tests.test_cli_info.Thing>" in text
    assert "\x1b" not in text and "a\nb" not in text
    assert "lowest: 1" in text and "lowest: 1" not in run("info", path, "--depth", 2)


def test_info_of_a_key(path: Path) -> None:
    assert run("info", path, "args.deep").split() == ["er", "lowest:", "1"]
    assert run("info", path, "history.1.loss").split() == ["history.1.loss:", "2.25"]
    done = CliRunner().invoke(cli.app, ["info", str(path), "args.rate"])
    assert done.exit_code == 2 and "rate" in done.stderr


def test_info_as_json(path: Path) -> None:
    found = json.loads(run("info", path, "--json"))
    assert found["format"] == "torch" and found["meta"]["global_step"] == 700


def test_lines_of_metadata_are_counted() -> None:
    lines, left_out = meta_lines({str(n): n for n in range(1000)}, limit=100)
    assert (len(lines), left_out) == (100, 900)
    assert meta_lines({str(n): n for n in range(1000)}, limit=None)[1] == 0
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    assert len(meta_lines(deep)[0]) == 400


def test_equal_entries_of_metadata_have_one_line() -> None:
    versions = {"": {"version": 1}} | {f"layers.{n}": {"version": 1 + (n == 5)} for n in range(9)}
    meta = {"_metadata": versions, "rates": {str(n): {"lr": n} for n in range(9)}}
    lines, _ = meta_lines(meta)
    assert [line.key for line in lines[:5]] == [
        "_metadata", "'', layers.0, layers.1 and 6 more alike", "version", "layers.5", "version"
    ]  # fmt: skip
    assert len(lines) == 5 + 1 + 2 * 9
    assert len(meta_lines(meta, fold=False)[0]) == 1 + 2 * 10 + 1 + 2 * 9


@pytest.mark.slow
def test_a_loss_is_looked_for_in_little_time() -> None:
    assert loss_of({"a": {"b": {"c": {"d": {"e": {"loss": 1.0}}}}}}) is None
    assert loss_of({"many": [{"x": n} for n in range(1_000_000)], "loss": True}) is None


def test_a_path_alone_is_listed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(path) == run("ls", path)
    monkeypatch.chdir(path.parent)
    assert run("model.pt", "--depth", 1) == run("ls", "model.pt", "--depth", 1)
    assert CliRunner().invoke(cli.app, ["nonsense"]).exit_code == 2


def test_globs(path: Path) -> None:
    assert run("ls", path, "layers.*.up").count("weight") == 3
    assert json.loads(run("ls", path, "*.1.*", "--json"))["numel"] == 12
    assert "layers.1.up.weight" in run("show", path, "*.1.up.*")
    for name in ("*.up.*", "*.nothing"):
        assert CliRunner().invoke(cli.app, ["show", str(path), name]).exit_code == 2
    assert CliRunner().invoke(cli.app, ["ls", str(path), "*.nothing"]).exit_code == 2


@pytest.mark.parametrize(
    "command", ["", "ls", "show", "info", "browse", "stats", "diff", "convert", "prune", "formats"]
)
def test_every_command_has_a_short_option_for_help(command: str) -> None:
    assert run(*filter(None, (command, "-h"))) == run(*filter(None, (command, "--help")))

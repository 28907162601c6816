"""The command line: what it prints, what it reads, how it ends."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import cli, demo
from lazyckpt.cli import options, program
from lazyckpt.core.select import parse_index
from lazyckpt.testing.counting import Counts, opened

from . import processes
from .writers import Case

ROOT = Path(__file__).parents[1]
ESCAPE = "\x1b"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoints: zero3/, model/, training.pt, bomb.pt."""
    folder = tmp_path_factory.mktemp("demo")
    demo.write(folder)
    return folder


def run(*args: str | Path) -> Any:
    return CliRunner().invoke(cli.app, [str(a) for a in args])


def out(*args: str | Path) -> str:
    """What a command that must succeed prints."""
    result = run(*args)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert ESCAPE not in result.stdout
    return result.stdout


def load(*args: str | Path) -> Any:
    """The JSON that a command prints; NaN and the like, which Python's parser would take, are no JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(out(*args, "--json"), parse_constant=refuse)


def process(*args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A real process, piped."""
    clean = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLUMNS")}
    return processes.run("-m", "lazyckpt", *args, env=clean | env)


# -- ls


def test_ls_prints_summary_and_tree(files: Path) -> None:
    lines = out("ls", files / "model").splitlines()
    assert lines[0] == "huggingface | 1.2M elements, 2.2 MiB in 39 tensors | 4 files"
    assert "lm_head.weight                         bf16 [1000, 128]             = model.embed_tokens.weight" in lines
    assert "        up_proj.weight                 bf16 [512, 128]   128.0 KiB  65.5k" in lines
    assert len(lines) == 1 + 39 + 2 + 4 * 3  # summary, tensors, "model" and "layers", layers and their two parts
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("prefix", ["model.layers.1.mlp", "layers.1.mlp"])
def test_ls_of_a_prefix(files: Path, prefix: str) -> None:
    lines = out("ls", files / "model", prefix).splitlines()
    assert "196.6k elements, 384.0 KiB in 3 tensors" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["down_proj.weight", "gate_proj.weight", "up_proj.weight"]


def test_ls_of_one_tensor(files: Path) -> None:
    assert out("ls", files / "model", "norm.weight").splitlines()[1].split() == [
        "model.norm.weight", "bf16", "[128]", "256", "B", "128"
    ]  # fmt: skip
    assert out("ls", files / "model", "lm_head.weight").splitlines()[1:] == [
        "lm_head.weight  bf16 [1000, 128]  250.0 KiB  = model.embed_tokens.weight"
    ]


def test_ls_depth(files: Path) -> None:
    def names(depth: int) -> list[str]:
        return [line.split()[0] for line in out("ls", files / "model", "--depth", str(depth)).splitlines()[1:]]

    assert names(1) == ["lm_head.weight", "model"]
    assert names(2) == ["lm_head.weight", "model", "embed_tokens.weight", "layers", "norm.weight"]
    assert len(names(20)) == len(out("ls", files / "model").splitlines()) - 1


def test_ls_json_is_complete(files: Path) -> None:
    view = lazyckpt.open(files / "model")
    found = load("ls", files / "model", "--depth", "1")
    assert {t["name"]: tuple(t["shape"]) for t in found["tensors"]} == {n: tuple(t.shape) for n, t in view.items()}
    assert {t["dtype"] for t in found["tensors"]} == {"bfloat16"}
    assert {t["name"]: t["tied"] for t in found["tensors"] if t["tied"]} == dict(view.aliases)
    assert (found["numel"], found["nbytes"]) == (view.numel, view.nbytes)
    assert (found["format"], found["state"], found["states"]) == ("huggingface", "weights", ["weights"])
    assert found["mesh"] == {"tp": 1, "pp": 1, "dp": 1, "ep": 1}
    assert found["problems"] == []
    assert found["files"] == {p.name: p.stat().st_size for p in (files / "model").glob("model*")}
    assert {t["name"] for t in load("ls", files / "model", "layers.0.mlp")["tensors"]} == {
        f"model.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")
    }


def test_ls_shows_problems(files: Path) -> None:
    text = out("ls", files / "bomb.pt")
    assert "| 1 problem\nproblem: bomb.pt: its pickle names posix.system" in text
    assert "posix.system" in load("ls", files / "bomb.pt")["problems"][0]
    assert not (files / "it_ran").exists()


def test_names_that_nothing_describes_are_told(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "model", tmp_path / "model")
    (tmp_path / "model" / "model-00002-of-00003.safetensors").unlink()
    view = lazyckpt.open(tmp_path / "model")
    assert view.unreadable
    found = load("ls", tmp_path / "model")
    assert (found["unreadable"], found["problems"]) == (dict(view.unreadable), list(view.problems))
    text = out("ls", tmp_path / "model")
    first, why = next(iter(view.unreadable.items()))
    lines = [line for line in text.splitlines() if line.startswith(f"problem: cannot be read: {first}, ")]
    assert len(lines) == 1 and f"and {len(view.unreadable) - 3} more" in lines[0]  # all for one reason
    assert lines[0].endswith(why.removeprefix(repr(first)))
    assert not set(view.unreadable) & {t["name"] for t in found["tensors"]}
    assert lines[0] in view.explain().splitlines()


def test_ls_of_states_mesh_and_raw_names(zero_cases: dict[str, Case]) -> None:
    case = zero_cases["zero2_bf16_dp2"]
    head, *tree = out("ls", case.path).splitlines()
    assert head.startswith("deepspeed-zero2 (dp=2) | ")
    assert "state weights (also fp32, exp_avg, exp_avg_sq" in head
    assert load("ls", case.path)["mesh"]["dp"] == 2
    moments = load("ls", case.path, "--state", "exp_avg")
    assert {t["name"] for t in moments["tensors"]} == set(case.truth["exp_avg"])
    assert all(t["dtype"] == "float32" for t in moments["tensors"])
    raw = {t["name"] for t in load("ls", case.path, "--stored")["tensors"]}
    assert any(name.startswith("mp_rank_00_model_states.pt/module.") for name in raw)
    tag = (case.path / "latest").read_text().strip()
    assert out("ls", case.path, "--tag", tag).splitlines() == [head, *tree]
    assert load("ls", case.path / tag, "--format", "deepspeed")["numel"] == load("ls", case.path)["numel"]


# -- show

KEYS = ["0:4, ::8", "3", "-1", "..., 0", "[3, 1, -1]", ":, [5, 2]", "::-100, None, ::-60", "0:0", "3, 4", "..."]


@pytest.mark.parametrize("key", KEYS)
def test_show_json_gives_every_value(files: Path, key: str) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    found = load("show", files / "model", f"{name}[{key}]")
    truth = lazyckpt.open(files / "model")[name][parse_index(key)]
    assert found["shape"] == list(truth.shape)
    assert found["values"] == truth.tolist()
    assert (found["name"], found["index"], found["dtype"]) == (name, key, "bfloat16")


def test_show_prints_values(tmp_path: Path) -> None:
    save_file({"w": torch.arange(12.0).view(3, 4)}, tmp_path / "a.safetensors")
    assert out("show", tmp_path / "a.safetensors", "w") == (
        "w  f32 [3, 4]  48 B\n[[ 0.,  1.,  2.,  3.],\n [ 4.,  5.,  6.,  7.],\n [ 8.,  9., 10., 11.]]\n"
    )
    assert out("show", tmp_path / "a.safetensors", "w[1:, ::2]") == (
        "w[1:, ::2]  f32 [2, 2]  16 B, of f32 [3, 4]\n[[ 4.,  6.],\n [ 8., 10.]]\n"
    )
    assert out("show", tmp_path / "a.safetensors", "w[2, 3]").splitlines()[1:] == ["11."]


def test_show_of_a_tied_name_a_state_and_an_inner_path(files: Path, zero_cases: dict[str, Case]) -> None:
    embedding = lazyckpt.open(files / "model")["model.embed_tokens.weight"]
    assert load("show", files / "model", "lm_head.weight[7]")["values"] == embedding[7].tolist()
    assert "tied: the same tensor as 'model.embed_tokens.weight'" in out("show", files / "model", "lm_head.weight[7]")
    assert load("show", files / "model", "embed_tokens.weight[7]")["name"] == "model.embed_tokens.weight"
    case = zero_cases["zero2_bf16_dp2"]
    name, moment = next((n, t) for n, t in case.truth["exp_avg"].items() if t.ndim == 2)
    assert load("show", case.path, f"{name}[1:]", "--state", "exp_avg")["values"] == moment[1:].tolist()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """What a command has read beyond opening."""
    total = Counts()

    def counting(path: str, **options: Any) -> lazyckpt.CheckpointView:
        view, counts = opened(path, **options)
        counts.clear()
        total.log = counts.log
        return view

    monkeypatch.setattr(options, "CheckpointView", counting)
    return total


def test_show_of_a_large_tensor_reads_its_edges(files: Path, counts: Counts) -> None:
    text = out("show", files / "model", "layers.0.mlp.down_proj.weight")
    assert counts.bytes == 6 * 6 * 2
    lines = text.splitlines()
    assert lines[0] == "model.layers.0.mlp.down_proj.weight  bf16 [128, 512]  128.0 KiB, the edges of it"
    assert len(lines) == 1 + 7
    assert lines[4] == " ...,"
    whole = lazyckpt.open(files / "model")["layers.0.mlp.down_proj.weight"][...]
    shown = [[float(x) for x in line.strip(" [],").split(",") if "..." not in x] for line in lines[1:4] + lines[5:]]
    edges = whole[[0, 1, 2, -3, -2, -1]][:, [0, 1, 2, -3, -2, -1]].float()
    torch.testing.assert_close(torch.tensor(shown), edges, rtol=0, atol=1e-4)


def test_show_of_a_tensor_larger_than_memory(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    rows, columns = 1 << 20, 1 << 20  # 2 TiB
    header = json.dumps({"w": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, rows * columns * 2]}})
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(header)) + header.encode())
        try:
            f.truncate(8 + len(header) + rows * columns * 2)
        except OSError:
            pytest.skip("this file system has no sparse files of 2 TiB")
    assert "2.0 TiB, the edges of it" in out("show", path, "w")
    assert "4 B, of bf16" in out("show", path, "w[-1, -2:]")


def test_show_of_many_dimensions(tmp_path: Path) -> None:
    many = torch.arange(2**14).view((2,) * 14)
    torch.save(
        {"many": many, "expanded": torch.ones(1).expand((2,) * 30), "five": torch.rand(9, 9, 9, 9, 9)},
        tmp_path / "a.pt",
    )
    text = out("show", tmp_path / "a.pt", "many")
    assert "at [0, 0, 0, 0, 0, ...]:" in text
    assert [
        int(x) for x in text.split("]:", 1)[1].replace("[", " ").replace("]", " ").replace(",", " ").split()
    ] == list(range(512))
    assert "the edges of it" in out("show", tmp_path / "a.pt", "expanded")
    assert "..." in out("show", tmp_path / "a.pt", "five")


def test_show_explain_reads_nothing(files: Path, counts: Counts) -> None:
    text = out("show", files / "model", "lm_head.weight[0:2]", "--explain")
    assert counts.requests == 0
    assert "lm_head.weight: 2x128 bf16, 512 bytes from 1 range in 1 file (512 bytes read)" in text
    assert "model-00001-of-00003.safetensors: bytes " in text
    assert load("show", files / "model", "lm_head.weight[0:2]", "--explain")["explain"] == text.rstrip("\n")


def special() -> dict[str, torch.Tensor]:
    return {
        "floats": torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-30]),
        "complex": torch.tensor([1 + 2j, complex(math.nan, 0)]),
        "half_complex": torch.tensor([1 + 2j], dtype=torch.complex32),
        "bool": torch.tensor([True, False]),
        "fp8": torch.tensor([1.5, -448.0]).to(torch.float8_e4m3fn),
        "fp8_scale": torch.tensor([127, 128], dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "fp4": torch.tensor([0x12, 0x7F], dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "int64": torch.tensor([2**62, -1]),
        "uint64": torch.tensor([2**63], dtype=torch.uint64),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
    }


AS_JSON = {
    "floats": ["NaN", "Infinity", "-Infinity", -0.0, float(torch.tensor(1e-30))],
    "complex": [[1.0, 2.0], ["NaN", 0.0]],
    "half_complex": [[1.0, 2.0]],
    "bool": [True, False],
    "fp8": [1.5, -448.0],
    "fp8_scale": [1.0, 2.0],
    "fp4": [0x12, 0x7F],
    "int64": [2**62, -1],
    "uint64": [2**63],
    "scalar": 3,
    "empty": [],
}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_show_of_every_kind_of_number(tmp_path: Path) -> None:
    torch.save(special(), tmp_path / "a.pt")
    for name in special():
        assert load("show", tmp_path / "a.pt", name)["values"] == AS_JSON[name]
        assert len(out("show", tmp_path / "a.pt", name).splitlines()) == 2


def test_show_of_a_file_that_is_one_tensor(tmp_path: Path) -> None:
    torch.save(torch.arange(4), tmp_path / "a.pt")
    assert load("show", tmp_path / "a.pt", "")["values"] == [0, 1, 2, 3]
    assert load("show", tmp_path / "a.pt", "[1:3]")["values"] == [1, 2]
    assert "''  i64 [4]" in out("ls", tmp_path / "a.pt")


# -- names that are not what they seem


@pytest.mark.slow
def test_names_print_literally(tmp_path: Path) -> None:
    names = ["[bold]x[/bold]", "[red]y", ":smile:", "a[0]", "a[0].b[1:2]", "c\x1b[31md", "e\nf", "g\u202eh", "ü"]
    save_file({name: torch.full((2,), float(n)) for n, name in enumerate(names)}, tmp_path / "a.safetensors")
    text = out("ls", tmp_path / "a.safetensors")
    for name in ("[bold]x[/bold]", "[red]y", ":smile:", "a[0]", "b[1:2]", r"c\x1b[31md", r"e\nf", r"g\u202eh", "ü"):
        assert name in text
    assert {t["name"] for t in load("ls", tmp_path / "a.safetensors")["tensors"]} == set(names)
    for n, name in enumerate(names):
        assert load("show", tmp_path / "a.safetensors", name)["values"] == [n, n]
        assert load("show", tmp_path / "a.safetensors", name + "[1]")["values"] == n
        assert ESCAPE not in out("show", tmp_path / "a.safetensors", name)
    assert process("show", tmp_path / "a.safetensors", "[bold]x[/bold][1]").stdout.startswith("[bold]x[/bold][1]  f32")
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}  # read when an interpreter starts
    listed = subprocess.run(
        [sys.executable, "-m", "lazyckpt", "ls", tmp_path / "a.safetensors"],
        env=ascii_only,
        capture_output=True,
        text=True,
    )
    assert r"\xfc" in listed.stdout


def test_a_name_with_very_many_dots_is_no_trouble(tmp_path: Path) -> None:
    deep = ".".join("a" * 50_000)
    save_file({deep: torch.ones(1), deep[:1001] + ".b": torch.ones(1)}, tmp_path / "a.safetensors")
    assert "2 tensors" in out("ls", tmp_path / "a.safetensors")


# -- rules


@pytest.fixture
def cut_in_two(tmp_path: Path) -> Path:
    """A ZeRO-0 checkpoint of two tensor-parallel ranks that says nothing of how its shards belong together."""
    weights = torch.arange(24.0).view(12, 2)
    q, k, v = weights[:6], weights[6:9], weights[9:]
    shards = [torch.cat([q[:4], k[:2], v[:1]]), torch.cat([q[4:], k[2:], v[1:]])]
    for rank, shard in enumerate(shards):
        module = {"h.qkv": shard, "h.norm": torch.ones(2)}
        saved = {"module": module, "dp_world_size": 1, "mp_world_size": 2, "optimizer": None}
        torch.save(saved, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")
    return tmp_path


def test_rules_from_a_file(cut_in_two: Path) -> None:
    rules = cut_in_two / "rules.toml"
    rules.write_text("""
        [rules]
        "h.*.bias" = "replicated"
        "*qkv" = { cat = 0, widths = [[4, 2], [2, 1], [1, 2]] }
        "h.nor?" = "column"
    """)
    found = load("show", cut_in_two, "h.qkv", "--rules", rules)
    assert found["values"] == torch.arange(24.0).view(12, 2).tolist()
    assert load("show", cut_in_two, "norm", "--rules", rules)["shape"] == [4]
    listed = load("ls", cut_in_two, "--rules", rules)
    assert {t["name"]: t["shape"] for t in listed["tensors"]} == {"h.qkv": [12, 2], "h.norm": [4]}
    (line,) = listed["problems"]
    assert line.startswith("rules['h.*.bias'] matches no tensor")
    assert "known from rules['*qkv']" in out("show", cut_in_two, "h.qkv[0]", "--rules", rules)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "rules.toml: no such file"),
        ("[rules]\n'*' = row", "rules.toml is no TOML"),
        ("[rules]\n'*' = row", "line 2"),
        ("'*' = 'row'", "should have one table [rules]"),
        ("", "should have one table [rules]"),
        ("rules = 3", "should have one table [rules]"),
        ("[rules]\n[options]", "should have one table [rules]"),
        ("[rules]\n'a.*' = 'diagonal'", "rules.toml: rules['a.*'] = 'diagonal' is not understood"),
        ("[rules]\n'a.*' = { cat = 0, width = 3 }", "rules.toml: rules['a.*'] = "),
    ],
)
@pytest.mark.parametrize("command", [["ls"], ["show", "h.norm"]])
def test_rules_that_cannot_be_read(cut_in_two: Path, command: list[str], text: str | None, says: str) -> None:
    path = cut_in_two / "rules.toml"
    if text is not None:
        path.write_text(text)
    result = run(command[0], cut_in_two, *command[1:], "--rules", path)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("error: ") and says in result.stderr


# -- errors


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["ls", "{}/nowhere"], "nowhere: no such file or folder"),
        (["ls", "{}"], "nothing says that they belong together: bomb.pt, training.pt, model"),
        (["ls", "{}/model", "layers.*.mpl"], "matches no name or prefix"),
        (["show", "{}/model", "up_prj"], "Did you mean 'up_proj'"),
        (["show", "{}/model", "nothing"], "At the top there is: 'model'"),
        (["show", "{}/model", "lm_head.weight[0"], "has a bracket that is not closed"),
        (["show", "{}/model", "model.norm"], "'model.norm' is no tensor, 1 tensor is below it"),
        (["stats", "{}/model", "layers.0.*"], "NAMES 'layers.0.*' matches none of 39 names"),
        (["ls", "{}/model", "layer.1"], "there is no tensor or prefix 'layer.1'"),
        (["ls", "{}/model", "--state", "exp_avg"], "has no state 'exp_avg'; it has: weights"),
        (["ls", "{}/model", "--stored", "--state", "weights"], "leave out --state"),
        (["ls", "{}/model", "--format", "nonsense"], "no reader is named 'nonsense'"),
        (["show", "{}/model", "lm_head.wieght[0]"], "Did you mean 'lm_head.weight'"),
        (["show", "{}/model", "layers.1"], "'layers.1' is no tensor, 9 tensors are below it"),
        (["show", "{}/model", "layers.1[0]"], "'layers.1' is no tensor, 9 tensors are below it"),
        (["show", "{}/model", "mlp.up_proj.weight"], "occurs at 4 places"),
        (["show", "{}/model", "lm_head.weight[1000]"], "index 1000 is out of range"),
        (["show", "{}/model", "lm_head.weight[0, 0, 0]"], "too many indices"),
        (["show", "{}/model", "lm_head.weight[::0]"], "slice"),
        (["show", "{}/model", "lm_head.weight[True]"], "a single bool is no index"),
        (["show", "{}/model", "lm_head.weight[open('x')]"], "the index [open('x')] is not understood"),
        (["demo", "--keep", "{}"], "is not an empty folder"),
        (["demo", "--keep", "{}/bomb.pt"], "is not an empty folder"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(files: Path, args: list[str], says: str) -> None:
    result = run(*(a.format(files) for a in args))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr


def test_usage_errors_exit_with_2(files: Path) -> None:
    for args in (["ls"], ["show"], ["ls", str(files / "model"), "--depth", "0"], ["nonsense"]):
        result = run(*args)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
        assert "--help` shows" in result.stderr


def test_json_of_too_many_values_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1, dtype=torch.int8).expand(1001, 1000)}, tmp_path / "a.pt")
    result = run("show", tmp_path / "a.pt", "w", "--json")
    assert result.exit_code == 2
    assert "1,001,000 elements are too many for JSON" in result.stderr
    assert len(load("show", tmp_path / "a.pt", "w[:1000]")["values"]) == 1000


@pytest.mark.parametrize(
    "text",
    ["a", "1.5", "'x'", "__import__('os').system('true')", "0][0", "0] + x[0", "0:(1:2)", "x := 1", "[[1]]", "*a",
     "1+1", "0:'a'", "lambda: 0", "", "(", "\0", "1j", "~1", "[i for i in (1,)]", "{1}", "-" * 5000 + "1",
     "(" * 500 + "0"],
)  # fmt: skip
def test_an_index_is_never_evaluated(text: str) -> None:
    with pytest.raises(lazyckpt.SelectionError, match="is not understood"):
        parse_index(text)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("0", 0),
        ("-3", -3),
        ("0:4, ::8", (slice(0, 4), slice(None, None, 8))),
        ("::-1", slice(None, None, -1)),
        (":", slice(None)),
        ("..., None, 1", (..., None, 1)),
        ("[1, -2, 3]", [1, -2, 3]),
        ("[]", []),
        ("[True, False]", [True, False]),
        ("None:3", slice(None, 3)),
        (" 1_000 ,", (1000,)),
    ],
)
def test_indices_are_what_python_makes_of_them(text: str, key: Any) -> None:
    assert parse_index(text) == key


# -- real processes


@pytest.mark.slow
def test_ls_in_a_process(files: Path) -> None:
    done = process("ls", files / "model", "layers.0", "--depth", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == [
        "input_layernorm.weight", "mlp", "post_attention_layernorm.weight", "self_attn"
    ]  # fmt: skip
    assert ESCAPE not in done.stdout


@pytest.mark.slow
def test_show_in_a_process(files: Path) -> None:
    done = process("show", files / "training.pt", "optimizer.state.0.exp_avg[0:2, :3]")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("optimizer.state.0.exp_avg[0:2, :3]  f32 [2, 3]  24 B, of f32 [64, 32]\n[[")
    failed = process("show", files / "training.pt", "optimizer.state.9.exp_avg")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("error: there is no tensor or prefix 'optimizer.state.9.exp_avg'")
    assert failed.stderr.count("\n") == 1


@pytest.mark.slow
def test_demo_in_a_process(tmp_path: Path) -> None:
    done = process("demo", TMPDIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []  # nothing is left
    assert ESCAPE not in done.stdout
    text = done.stdout
    assert "1,152 bytes from 2 ranges in 2 files (1,152 bytes read)" in text
    assert "| 1,152 bytes (" in text  # counted by the file system: opening has compared the headers
    assert "21 of 21 tensors are equal" in text
    proofs = [line for line in text.splitlines() if line.startswith(">>> all(")]
    assert len(proofs) == 2 and all(f"{line}\nTrue\n" in text for line in proofs)
    assert "its pickle names posix.system" in text
    assert '>>> (folder / "it_ran").exists()\nFalse\n' in text


@pytest.mark.slow
def test_demo_keeps_its_files(tmp_path: Path) -> None:
    text = out("demo", "--keep", tmp_path / "new" / "folder")
    assert "The files are in" in text
    command = text.splitlines()[-1].split()
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # what it says to try works here
    assert done.stdout.startswith("deepspeed-zero3 ")
    names = ["bomb.pt", "converted", "model", "training.pt", "zero3"]
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == names
    assert len(lazyckpt.open(tmp_path / "new" / "folder" / "model")) == 39


@pytest.mark.slow
def test_demo_json() -> None:
    steps = load("demo")
    assert {"code": '(folder / "it_ran").exists()', "text": "False\n"} in steps


@pytest.mark.slow
def test_the_demo_model_is_one_that_transformers_loads(files: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(files / "model", dtype=torch.bfloat16)
    view = lazyckpt.open(files / "model")
    state = model.state_dict()
    assert set(state) == set(view)
    assert all(torch.equal(view[name][...], tensor) for name, tensor in state.items())


@pytest.mark.slow
def test_colours_are_for_terminals(files: Path) -> None:
    assert ESCAPE in process("ls", files / "model", FORCE_COLOR="1").stdout
    assert ESCAPE not in process("ls", files / "model").stdout


@pytest.mark.slow
@pytest.mark.parametrize("args", [["ls"], ["ls", "--json"]])
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path, args: list[str]) -> None:
    save_file({f"layers.{n}.weight": torch.zeros(1) for n in range(20_000)}, tmp_path / "a.safetensors")
    command = [sys.executable, "-m", "lazyckpt", args[0], str(tmp_path / "a.safetensors"), *args[1:]]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        assert p.stdout is not None and p.stderr is not None
        p.stdout.readline()
        p.stdout.close()
        assert p.stderr.read() == ""
        assert p.wait(timeout=60) == 128 + 13


def test_version() -> None:
    assert out("--version") == f"lazyckpt {lazyckpt.__version__}\n"


@pytest.mark.parametrize("args", [[], ["ls"], ["show"], ["demo"]])
def test_help(args: list[str]) -> None:
    assert "Usage:" in out(*args, "--help")


@pytest.mark.parametrize("name", program.COMMANDS)
def test_the_line_of_a_command_is_that_of_its_help(name: str) -> None:
    assert out(name, "--help").split("\n\n")[1].split() == program.COMMANDS[name].split()


@pytest.mark.slow
def test_help_imports_no_torch() -> None:
    code = "import sys\nfrom lazyckpt.cli import main\ntry:\n    main()\nfinally:\n    print('torch' in sys.modules)"
    for option in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", code, option], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "False"


def test_each_command_fits_its_line_of_help() -> None:
    lines = out("--help").partition("Commands:")[2].strip().splitlines()
    assert len(lines) == len(program.COMMANDS)
    assert not [line for line in lines if line.endswith("...")]

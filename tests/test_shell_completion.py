"""What Tab offers on the command line, as a shell asks for it, and that hostile names are not offered to a shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from lazyckpt.cli.completing import levels

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = [f"model.layers.{n}.mlp.{w}" for n in (0, 1, 10) for w in ("up", "down")]
    names += ["model.norm", "head", "$(touch hacked)", "`touch hacked`", "a b", "x'y", "line\nbreak", "\x1b[31m", "*"]
    path = tmp_path_factory.mktemp("completion") / "model.safetensors"
    save_file({name: torch.zeros(2) for name in names}, path)
    return path


def offered(*words: str) -> tuple[list[str], str]:
    """What the program offers for the last of these words, and what it prints on stderr."""
    env = os.environ | {"COMP_WORDS": " ".join(("lazyckpt", *words)), "COMP_CWORD": str(len(words))}
    env |= {"_LAZYCKPT_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-m", "lazyckpt"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    return [line for line in done.stdout.splitlines() if line], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "want"),
    [
        (("show", "{}", "mo"), ["model.layers.", "model.norm"]),
        (("ls", "{}", "model.layers.1."), ["model.layers.1.mlp.down", "model.layers.1.mlp.up"]),
        (("show", "{}", "model.layers."), ["model.layers.0.", "model.layers.1.", "model.layers.10."]),
        (("ls", "{}", "--stat"), ["--state"]),
        (("ls", "{}", "--state", "exp"), ["exp_avg", "exp_avg_sq"]),
        (("bro",), ["browse"]),
        (("ls", "nowhere", ""), []),
    ],
)
def test_what_is_offered(path: Path, words: tuple[str, ...], want: list[str]) -> None:
    assert offered(*(word.format(path) for word in words)) == (want, "")


@pytest.mark.slow
def test_names_that_mean_something_to_a_shell_are_not_offered(path: Path) -> None:
    found, errors = offered("show", str(path), "")
    assert (found, errors) == (["head", "model."], "")


@pytest.mark.slow
def test_options_need_no_torch(path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from lazyckpt.cli import main; main()"
    for words in (("show", str(path), "mo"), ("diff", "--pre"), ("browse", "--st"), ("stats", "--so")):
        env = os.environ | {"COMP_WORDS": " ".join(("lazyckpt", *words)), "COMP_CWORD": str(len(words))}
        env |= {"_LAZYCKPT_COMPLETE": "complete_bash", "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert done.stdout and not done.stderr, words


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_in_a_shell(path: Path, shell: str, tmp_path: Path) -> None:
    """The script that --install-completion installs, called as the shell calls it."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell}")
    (tmp_path / "lazyckpt").write_text(f'#!/bin/sh\nexec {sys.executable} -m lazyckpt "$@"\n')
    (tmp_path / "lazyckpt").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["lazyckpt", "--install-completion", shell], env=env | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if shell == "bash":
        script = (
            f"source {tmp_path}/.bash_completions/lazyckpt.sh; COMP_WORDS=(lazyckpt show {path} model.l); "
            'COMP_CWORD=3; _lazyckpt_completion lazyckpt; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        want = "model.layers.0.\nmodel.layers.1.\nmodel.layers.10.\n"
    else:
        script = (
            f"words=(lazyckpt show {path} model.l); CURRENT=4; compdef() {{ :; }}; "
            f'_arguments() {{ print -r -- "$*"; }}; source {tmp_path}/.zfunc/_lazyckpt; _lazyckpt_completion'
        )
        want = '*: :(("model.layers.0."\n"model.layers.1."\n"model.layers.10."))\n'
    done = subprocess.run([program, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (want, "")
    assert not (tmp_path / "hacked").exists()


@given(st.lists(st.lists(st.sampled_from("ab01"), min_size=1, max_size=4).map(".".join), max_size=12), st.text("ab01."))
def test_levels_lead_to_every_name(names: list[str], start: str) -> None:
    """Whoever goes on from what is offered reaches each name that begins with the text, and nothing else."""
    ordered = sorted(set(names))
    reached, left = set(), [start]
    while left:
        for found in levels(ordered, left.pop()):
            assert found.startswith(start)
            if found in ordered:
                reached.add(found)
            else:
                assert found.endswith(".")
                left.append(found)
    assert reached >= {name for name in ordered if name.startswith(start) and f"{name}." not in start}

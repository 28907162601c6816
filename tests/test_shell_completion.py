"""What Tab offers on the command line, as a shell asks for it, and that names are inserted as they are, and not run."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
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
    names += ["-option", "sp ace's $(touch hacked)", "c:d=e", "\u5c42"]
    path = tmp_path_factory.mktemp("completion") / "model.safetensors"
    save_file({name: torch.zeros(2) for name in names}, path)
    return path


def asking(*words: str) -> dict[str, str]:
    """The environment in which bash asks for the last of these words."""
    line = " ".join(("lazyckpt", *words))
    return os.environ | {"_LAZYCKPT_LINE": line, "_LAZYCKPT_BREAKS": ":=@", "_LAZYCKPT_COMPLETE": "complete_bash"}


def offered(*words: str) -> tuple[list[str], str]:
    """What the program offers for the last of these words, and what it prints on stderr."""
    env = asking(*words)
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
        (("show", "{}", "sp"), [r"sp\ ace\'s\ \$\(touch\ hacked\)"]),
        (("show", "{}", '"sp'), ["sp ace's \\$(touch hacked)"]),
        (("show", "{}", "c:"), [r"d\=e"]),
        (("show", "{}", "--state=exp_avg_"), ["exp_avg_sq"]),
        (("digest", "{}", "--algorithm", "b"), ["blake3"]),
    ],
)
def test_what_is_offered(path: Path, words: tuple[str, ...], want: list[str]) -> None:
    assert offered(*(word.format(path) for word in words)) == (want, "")


@pytest.mark.slow
def test_names_that_cannot_be_typed_are_not_offered(path: Path) -> None:
    found, errors = offered("show", str(path), "'")
    plain = ["$(touch hacked)", "*", "`touch hacked`", "a b", "c:d=e", "head", "model.", "sp ace'\\''s $(touch hacked)"]
    assert (found, errors) == ([*plain, "x'\\''y", "\u5c42"], "")


@pytest.mark.slow
def test_options_need_no_torch(path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from lazyckpt.cli import main; main()"
    for words in (("show", str(path), "mo"), ("diff", "--pre"), ("browse", "--st"), ("stats", "--so")):
        env = asking(*words) | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert done.stdout and not done.stderr, words


@pytest.fixture(scope="module")
def shells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of shells in whose home the completion is installed by the one command."""
    home = tmp_path_factory.mktemp("home")
    (home / "lazyckpt").write_text(f'#!/bin/sh\nexec {sys.executable} -m lazyckpt "$@"\n')
    (home / "lazyckpt").chmod(0o755)
    env = os.environ | {"PATH": f"{home}:{os.environ['PATH']}", "HOME": str(home), "PYTHONPATH": str(ROOT)}
    env |= {"XDG_CONFIG_HOME": str(home / ".config"), "ZDOTDIR": str(home), "TERM": "xterm"}
    for shell in filter(shutil.which, ("bash", "zsh", "fish")):
        done = subprocess.run(
            ["lazyckpt", "--install-completion", shell], capture_output=True, text=True, check=False,
            env=env | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    return env


def program(shell: str) -> str:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"there is no {shell}")
    return found


LEVELS = "model.layers.0.\nmodel.layers.1.\nmodel.layers.10.\n"


@pytest.mark.slow
def test_in_bash(path: Path, shells: dict[str, str]) -> None:
    script = (
        f"source {shells['HOME']}/.bash_completions/lazyckpt.sh; COMP_LINE='lazyckpt show {path} model.l'; "
        'COMP_POINT=${#COMP_LINE}; _lazyckpt_completion lazyckpt; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run([program("bash"), "-c", script], env=shells, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (LEVELS, "")


@pytest.mark.slow
def test_in_fish(path: Path, shells: dict[str, str]) -> None:
    """`complete -C` prints what Tab offers."""
    script = f"complete -C 'lazyckpt show {path} model.l'; complete -C 'lazyckpt ls {path.parent}/mod'"
    done = subprocess.run([program("fish"), "-c", script], env=shells, capture_output=True, text=True, check=False)
    assert done.stdout == f"{LEVELS}{path}\n", done.stderr


@pytest.mark.slow
def test_in_zsh(path: Path, shells: dict[str, str]) -> None:
    """An interactive zsh completes at the first Tab, and quotes a name."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    seen = b""
    with subprocess.Popen(
        [program("zsh"), "-i"], env=shells, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as zsh:
        os.close(theirs)
        try:
            for typed, awaited in (
                (b"PS1=ready\n", b"Jready"),
                (f"lazyckpt show {path} sp\t".encode(), b"sp\\ ace\\'s\\ \\$\\(touch\\ hacked\\)"),
            ):
                os.write(ours, typed)
                end = time.monotonic() + 30
                while awaited not in seen and time.monotonic() < end:
                    if select.select([ours], [], [], 0.1)[0]:
                        seen += os.read(ours, 1 << 16)
                assert awaited in seen, seen
        finally:
            zsh.kill()
    os.close(ours)


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

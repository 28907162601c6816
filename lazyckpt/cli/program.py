"""The program: which commands it has, how they end, and its own options.

A command's module is imported when the command is called, or its help is asked for: most of them import torch, which
takes a second or two.
"""

from __future__ import annotations

import io
import os
import sys
from functools import cache
from importlib import import_module, metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import LazyckptError
from .console import write_error

# Command -> the first line of its help. Its module and function have the same name.
COMMANDS = {
    "ls": "List the tensors of a checkpoint as a tree.",
    "show": "Print a tensor or, as in Python, a part of it.",
    "info": "Print what a checkpoint is, and its metadata as a tree.",
    "browse": "Move around in a checkpoint.",
    "stats": "What the elements of every tensor are like.",
    "diff": "Compare two checkpoints of any formats, tensor by tensor.",
    "convert": "Write a checkpoint in another layout.",
    "prune": "Remove the older checkpoints of a run.",
    "formats": "List the formats that are read.",
    "demo": "Write small real checkpoints and walk through them.",
}
_SETTINGS = {"help_option_names": ["-h", "--help"]}
_PIPE = 128 + 13  # what a shell tells of a program that SIGPIPE ends


class _Group(TyperGroup):
    """Commands whose expected errors are one line, and that end quietly when the reader of a pipe has seen enough."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """``lazyckpt PATH`` is ``lazyckpt ls PATH``: of what is no command, but a path."""
        first = args[0] if args else ""
        if first not in COMMANDS and (set(first) & set("/.:") or os.path.exists(first)):
            args = ["ls", *args]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return self._told(ctx)
        except BrokenPipeError:
            # the interpreter flushes stdout once more at its end: into nothing
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(_PIPE) from None

    def _told(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            raise
        except (LazyckptError, OSError) as e:
            write_error(str(e))
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            write_error("interrupted")
            raise typer.Exit(130) from None


@cache
def command(name: str) -> Any:
    """The click command of this name; its module is imported."""
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(name, context_settings=_SETTINGS)(getattr(import_module(f".{name}", __package__), name))
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
)


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names may hold what the terminal's encoding lacks
            stream.reconfigure(errors="lazyckpt")
    app(prog_name="lazyckpt")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lazyckpt {metadata.version('lazyckpt')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Open huge model checkpoints as one namespace of lazy tensors.

    `lazyckpt PATH` is `lazyckpt ls PATH`.
    """

"""What the commands hang on: how they end, and the options of the program itself."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..errors import LazyckptError
from ..io.remote import is_url
from .console import write_error

_PIPE = 128 + 13  # what a shell tells of a program that SIGPIPE ends


class _Group(TyperGroup):
    """Commands whose expected errors are one line, and that end quietly when the reader of a pipe has seen enough."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """``lazyckpt PATH`` is ``lazyckpt ls PATH``: of what is no command, but a path."""
        first = args[0] if args else ""
        if self.get_command(ctx, first) is None and (is_url(first) or set(first) & set("/.") or os.path.exists(first)):
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


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names may hold what the terminal's encoding lacks
            stream.reconfigure(errors="lazyckpt")
    app(prog_name="lazyckpt")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lazyckpt {__version__}")
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

"""The program: its commands, its exit codes and its own options.

A command's module is imported only when the command or its help is called, because most of them import torch, which
takes a second or two.
"""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..errors import LazyckptError, printable
from .console import replace_unknown, write_error

# Command -> first line of its help. The command's module and function have the same name.
COMMANDS = {
    "ls": "List the tensors of a checkpoint as a tree.",
    "show": "Print a tensor or a slice of it.",
    "info": "Describe a checkpoint and print its metadata as a tree.",
    "browse": "Browse a checkpoint interactively in the terminal.",
    "serve": "Show a checkpoint in a web browser.",
    "report": "Write a checkpoint as one HTML file to look at.",
    "stats": "Compute statistics of every tensor.",
    "updates": "Compute how large the optimizer's last step was.",
    "diff": "Compare two checkpoints of any formats, tensor by tensor.",
    "digest": "Print digests of the contents, which are the same in every format.",
    "verify": "Check whether a checkpoint is whole and its values are sane.",
    "scan": "Tell whether files are safe to load with programs that unpickle them.",
    "convert": "Write a checkpoint in another format.",
    "merge": "Merge models to a folder for transformers, in bounded memory.",
    "delta": "Write what a checkpoint changes of another one.",
    "lora": "Write the difference of two models as a LoRA adapter.",
    "prune": "Remove the older checkpoints of a run, or thin them.",
    "cache": "List or remove what is kept in the user's cache folder.",
    "formats": "List the formats that lazyckpt reads.",
    "demo": "Write small real checkpoints and walk through them.",
}
UsageError: Any = typer.BadParameter.__base__  # of a command line that cannot be parsed
_SETTINGS = {"help_option_names": ["-h", "--help"]}
_PIPE = 128 + 13  # exit code that a shell reports for a program killed by SIGPIPE


class _Group(TyperGroup):
    """The group of commands. It prints expected errors as one line, and exits quietly when the reader closes a pipe."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Treat ``lazyckpt PATH`` as ``lazyckpt ls PATH`` if the first argument is a path and not a command."""
        first = args[0] if args else ""
        if first not in COMMANDS and (set(first) & set("/.:") or os.path.exists(first)):
            args = ["ls", *args]
        elif first not in COMMANDS and not first.startswith("-"):
            near = get_close_matches(first, COMMANDS, 3, 0.6)
            hint = f": did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"There is no command, file or folder '{printable(first)}'{hint}")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Report options that the program itself does not have as all other errors."""
        given = bool(args)
        try:
            return super().parse_args(ctx, args)
        except UsageError as e:
            if not given:  # this "error" is the help
                raise
            raise _refused(e) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return self._report_errors(ctx)
        except BrokenPipeError:
            # the interpreter flushes stdout again when it exits: that must not fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(_PIPE) from None

    def _report_errors(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            raise
        except OSError as e:
            where = "" if e.filename is None else f"{os.fsdecode(e.filename)}: "
            write_error(f"{where}{e.strerror}" if e.strerror else str(e))
            raise typer.Exit(2) from None
        except LazyckptError as e:
            write_error(str(e))
            raise typer.Exit(2) from None
        except UsageError as e:
            raise _refused(e) from None
        except KeyboardInterrupt:
            write_error("interrupted")
            raise typer.Exit(130) from None


def _refused(error: Any) -> typer.Exit:
    """Print why a command line cannot be parsed; return what ends the program."""
    path = getattr(error.ctx, "command_path", "lazyckpt")
    text = error.format_message()
    write_error(f"{text if text.endswith(('.', '?')) else text + '.'} `{path} --help` shows what there is.")
    return typer.Exit(2)


@cache
def command(name: str) -> Any:
    """Import the module of a command and return its click command."""
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(name, context_settings=_SETTINGS)(getattr(import_module(f".{name}", __package__), name))
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
)


def main() -> None:
    """Run the console script."""
    replace_unknown("lazyckpt")
    asked = any(one.startswith(("--install-completion", "--show-completion")) for one in sys.argv[1:2])
    if asked or "_LAZYCKPT_COMPLETE" in os.environ:
        from .shells import prepare

        prepare()
    app(prog_name="lazyckpt")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # takes as long to import as the rest of this module

        typer.echo(f"lazyckpt {version('lazyckpt')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Open huge model checkpoints as one namespace of lazy tensors.

    `lazyckpt PATH` is short for `lazyckpt ls PATH`.
    """

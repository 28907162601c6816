"""`lazyckpt digest`: digests of the contents of a checkpoint, or of its files."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import DataError, printable, some
from ..inspect.files import statement
from ..runs.view import RunView
from . import completing
from .console import write_error, write_text
from .options import BaseOption, FormatOption, PathArg, RulesOption, StateOption, TagOption, open_view, state_of
from .workers import target_of_work


def digest(
    path: PathArg,
    state: StateOption = None,
    algorithm: Annotated[
        str, typer.Option(metavar="NAME", help="sha256 or blake3.", autocompletion=completing.words("sha256", "blake3"))
    ] = "sha256",
    lines: Annotated[
        bool, typer.Option("--lines", help="Print a line for each tensor: algorithm, digest, name.")
    ] = False,
    root: Annotated[bool, typer.Option("--root", help="Print only the digest of everything.")] = False,
    run: Annotated[
        bool, typer.Option("--run", help="Print a line for each checkpoint of a run: algorithm, digest, step.")
    ] = False,
    files: Annotated[
        bool, typer.Option("--files", help="Print SHA-256 of the files instead, as model-signing signs them.")
    ] = False,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory for the work in flight: 2GB")] = None,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Use N processes.")] = None,
    cluster: Annotated[str | None, typer.Option(metavar="WHERE", help="Use a cluster: dask://HOST:PORT, slurm")] = None,
    tag: TagOption = None,
    format: FormatOption = None,
    rules: RulesOption = None,
    base: BaseOption = None,
) -> None:
    """Print digests of the contents, which are the same in every format.

    Prints a manifest in JSON. The digest of a tensor depends on its dtype, shape and elements, not on files, ranks or
    format. All data is read once.

    Exit codes: 0 complete, 1 some tensors cannot be read (the manifest says why), 2 an error.
    """
    if files:
        elsewhere = workers is not None or cluster is not None
        if run or state is not None or lines or root or algorithm != "sha256" or elsewhere:
            raise DataError("--files hashes whole files with SHA-256 on threads: only --memory applies to it")
        write_text(statement(path, memory=memory))
        return
    if run:
        others = lines or root or any(given is not None for given in (tag, rules, format, base))
        _of_run(path, state, others, algorithm, memory, workers, cluster)
        return
    view = open_view(path, state, False, tag, format, rules, base)
    with target_of_work(workers, cluster) as executor:
        found = view.digest(algorithm=algorithm, executor=executor, memory=memory)
    if root and not found.errors:
        write_text(str(found))
    elif lines:
        for state_name, table in found.states.items():
            for name, one in table.items():
                full = name if len(found.states) == 1 else f"{state_name}: {name}"
                write_text(f"{algorithm} {one.digest or '-'} {printable(full)}")
    elif not root:
        write_text(found.to_json().removesuffix("\n"))
    if found.errors:
        names = [f"{name} ({why})" for (_, name), why in found.errors.items()]
        write_error(f"{len(names):,} tensors cannot be read: {some(names)}")
        raise typer.Exit(1)


def _of_run(
    path: str,
    state: str | None,
    others: bool,
    algorithm: str,
    memory: str | None,
    workers: int | None,
    cluster: str | None,
) -> None:
    """Print a line for each checkpoint of a run. Raises Exit with code 1 if one of them cannot be read whole."""
    if others:
        raise DataError(
            "--run prints a line for each checkpoint: leave out --lines, --root, --tag, --rules, --format and --base"
        )
    whole = True
    with target_of_work(workers, cluster) as executor:
        view = RunView(path)
        for step in view.steps:
            one = state_of(view.at(step), path, state, False)
            found = one.digest(algorithm=algorithm, executor=executor, memory=memory)
            whole &= found.root is not None
            write_text(f"{algorithm} {found.root or '-'} {step}")
    if not whole:
        write_error("tensors cannot be read where the digest is -: lazyckpt digest PATH --tag NAME names them")
        raise typer.Exit(1)

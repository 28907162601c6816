"""`lazyckpt digest`: digests of the contents of a checkpoint, or of its files."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import DataError, printable, some
from ..inspect.files import statement
from .console import write_error, write_text
from .options import FormatOption, PathArg, RulesOption, StateOption, TagOption, open_view
from .workers import target_of_work


def digest(
    path: PathArg,
    state: StateOption = None,
    algorithm: Annotated[str, typer.Option(metavar="NAME", help="sha256 or blake3.")] = "sha256",
    lines: Annotated[
        bool, typer.Option("--lines", help="Print a line for each tensor: algorithm, digest, name.")
    ] = False,
    root: Annotated[bool, typer.Option("--root", help="Print only the digest of everything.")] = False,
    files: Annotated[
        bool, typer.Option("--files", help="Print SHA-256 of the files instead, as model-signing signs them.")
    ] = False,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory for the work in flight: 2GB")] = None,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Use N processes.")] = None,
    cluster: Annotated[str | None, typer.Option(metavar="WHERE", help="Use a cluster: dask://HOST:PORT, slurm")] = None,
    tag: TagOption = None,
    format: FormatOption = None,
    rules: RulesOption = None,
) -> None:
    """Print digests of the contents, which are the same in every format.

    Prints a manifest in JSON. The digest of a tensor depends on its dtype, shape and elements, not on files, ranks or
    format. All data is read once.

    Exit codes: 0 complete, 1 some tensors cannot be read (the manifest says why), 2 an error.
    """
    if files:
        others = state is not None or lines or root or algorithm != "sha256" or workers is not None or cluster is not None
        if others:
            raise DataError("--files hashes whole files with SHA-256 on threads: only --memory applies to it")
        write_text(statement(path, memory=memory))
        return
    view = open_view(path, state, False, tag, format, rules)
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

"""`lazyckpt serve`: the explorer as a local web page."""

from __future__ import annotations

import os
import sys
import webbrowser
from typing import Annotated

import typer

from ..core.dtypes import dtype_named
from ..exploring import serve as serving
from ..io.system import share_heap
from . import completing
from .console import write_error, write_line
from .options import BaseOption, FormatOption, PathArg, RulesOption, TagOption, read_rules


def serve(
    path: PathArg,
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="A second checkpoint, to compare with.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port to listen on; 0: a free one.")] = 0,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="Name of a proxy or tunnel that leads here; * for any."),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(metavar="TEXT", envvar="LAZYCKPT_TOKEN", help="Token of the address (default: random)."),
    ] = None,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    rename: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Names for hf/ and zarr/: hf, megatron.",
            autocompletion=completing.tables,
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Dtype of weights in hf/ and zarr/: bf16.",
            autocompletion=completing.dtypes,
            show_default=False,
        ),
    ] = None,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Offer the unquantized model in hf/ and zarr/ (default: as bf16).")
    ] = False,
    tag: TagOption = None,
    format: FormatOption = None,
    rules: RulesOption = None,
    base: BaseOption = None,
) -> None:
    """Show a checkpoint in a web browser.

    A run, or two checkpoints side by side, can be shown, too. Prints the address of the page and serves it until
    Ctrl-C. The server only reads, and listens on this machine alone unless --host says otherwise. Requests without the
    token of the address are refused.

    It also offers the checkpoint as if it had been converted, without writing anything: as a folder of safetensors
    (hf/) and as a Zarr store (zarr/), for curl, safetensors, transformers, zarr and xarray.
    """
    share_heap()
    rule = None if rules is None else read_rules(rules)
    with serving(
        path,
        other,
        host=host,
        port=port,
        token=token,
        hosts=allow_host or (),
        rename=rename,
        dtype=None if dtype is None else dtype_named(dtype).torch,
        dequantize=dequantize,
        tag=tag,
        format=format,
        rules=rule,
        base=base,
    ) as server:
        write_line(("The explorer is at ", ""), (server.url, "bold"))
        write_line((f"As a folder of safetensors: {server.address}hf/", "dim"))
        write_line((f"As a Zarr store: {server.address}zarr/", "dim"))
        write_line(("Ctrl-C stops it.", "dim"))
        sys.stdout.flush()  # a pipe or a log has the address while the server runs
        if browser:
            webbrowser.open(server.url)
        try:
            server.wait()
        except KeyboardInterrupt:
            server.close()
            if server.running:  # a read of a storage that does not answer: Python would wait for its thread
                write_error("interrupted")
                sys.stdout.flush()
                os._exit(130)
            raise

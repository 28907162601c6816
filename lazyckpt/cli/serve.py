"""`lazyckpt serve`: the explorer as a local web page."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

from ..exploring import serve as serving
from .console import write_line
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
    tag: TagOption = None,
    format: FormatOption = None,
    rules: RulesOption = None,
    base: BaseOption = None,
) -> None:
    """Show a checkpoint, a run, or two checkpoints side by side in a web browser.

    Prints the address of the page and serves it until Ctrl-C. The server only reads, and listens on this machine alone
    unless --host says otherwise. Who does not know the token of the address sees nothing.
    """
    rule = None if rules is None else read_rules(rules)
    with serving(
        path,
        other,
        host=host,
        port=port,
        token=token,
        hosts=allow_host or (),
        tag=tag,
        format=format,
        rules=rule,
        base=base,
    ) as server:
        write_line(("The explorer is at ", ""), (server.url, "bold"))
        write_line(("Ctrl-C stops it.", "dim"))
        if browser:
            webbrowser.open(server.url)
        server.wait()

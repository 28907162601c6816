"""The explorer in a notebook: an anywidget, whose messages carry the API's requests and answers.

A message from the page is ``{"id": text, "request": "path?name=value&..."}``, ``{"cancel": id}`` or ``{"ping": text}``.
The answer to the first is ``{"id": text, "status": s}`` with the body as its buffer, to the last ``{"pong": text}``.
All views of a widget get all answers: each view takes ids that others lack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from typing import Any

from ..derive.sources import address_of
from ..errors import DataError, printable
from .api import Explorer
from .packing import to_json
from .query import Cancelled, parameters
from .server import asset

_THREADS = 4  # requests of all widgets that are answered at the same time


class Channel:
    """Answers the messages of one widget's page.

    Parameters
    ----------
    explorer
        Answers the requests.
    send
        Sends a message and its buffers to the page. It is called in threads.
    """

    def __init__(self, explorer: Explorer, send: Any) -> None:
        self._explorer = explorer
        self._send = send
        self._closed = False
        self._wanted: dict[str, bool] = {}

    def receive(self, content: Any) -> None:
        """Answer a message in a thread; end the work of a cancelled one. Other messages are ignored."""
        if not isinstance(content, Mapping):
            return
        cancelled = content.get("cancel")
        if isinstance(cancelled, str) and cancelled in self._wanted:
            self._wanted[cancelled] = False
        ping = content.get("ping")
        if isinstance(ping, str):
            self._send({"pong": ping})
        number, request = content.get("id"), content.get("request")
        if isinstance(number, str) and isinstance(request, str) and not self._closed:
            self._wanted[number] = True
            _pool().submit(self._answer, number, request)

    def close(self) -> None:
        """End the work of all requests, and forget what was answered."""
        self._closed = True
        self._wanted = dict.fromkeys(self._wanted, False)
        self._explorer.forget()

    def _answer(self, number: str, request: str) -> None:
        path, _, query = request.partition("?")
        try:
            if self._wanted.get(number):
                answer = self._explorer.answer(path, parameters(query), lambda: self._wanted.get(number, False))
                self._send({"id": number, "status": answer.status}, [answer.body])
        except Cancelled:
            pass  # the page has forgotten the request
        except Exception as e:  # the page waits for an answer
            error = {"error": {"kind": type(e).__name__, "message": f"the explorer failed: {e}"}}
            self._send({"id": number, "status": 500}, [to_json(error)])
            raise
        finally:
            self._wanted.pop(number, None)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="lazyckpt widget")


def widget(explorer: Explorer, height: int = 640) -> Any:
    """Return the widget of an explorer.

    Parameters
    ----------
    explorer
        Answers the requests.
    height
        Height of the widget in CSS pixels.

    Returns
    -------
    anywidget.AnyWidget
        The widget. A notebook shows it as the value of a cell.

    Raises
    ------
    DataError
        anywidget is not installed.
    """
    if find_spec("anywidget") is None:
        raise DataError("the explorer in a notebook needs anywidget: pip install 'lazyckpt[explore]'")
    found = _kind()(height=height)
    found.channel = channel = Channel(explorer, found.send)
    found.on_msg(lambda _widget, content, _buffers: channel.receive(content))
    found.title = printable(explorer.subject.title or address_of(explorer.subject.view))
    found.still = getattr(explorer.subject.view, "_repr_html_", str)
    return found


@cache
def _kind() -> Any:
    import anywidget
    import traitlets

    class Widget(anywidget.AnyWidget):
        """The explorer of a checkpoint."""

        _esm = asset("explorer.js").decode()
        _css = asset("explorer.css").decode()
        height = traitlets.Int().tag(sync=True)
        route = traitlets.Unicode().tag(sync=True)
        channel: Channel
        still: Callable[[], str]
        title: str

        def __repr__(self) -> str:
            return f"<explorer of {self.title}>"

        def _repr_mimebundle_(self, **options: Any) -> Any:
            """Return the widget, and the view as static HTML for places that have no kernel, such as GitHub."""
            found = super()._repr_mimebundle_(**options)
            if not found:
                return found
            data, *about = found if isinstance(found, tuple) else (found,)
            data = {**data, "text/html": self.still()}
            return (data, *about) if about else data

        def close(self) -> None:
            """Close the widget: requests end, and what was answered is forgotten."""
            self.channel.close()
            super().close()

    return Widget

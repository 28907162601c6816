"""``python``: the lines of Python that give what a page shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..lines import PAGES
from ..query import Query
from ..subject import MORE, Subject, Wanted


def python(subject: Subject, query: Query) -> dict[str, Any]:
    """Write the lines of Python that give the pictures and tables of a page. Nothing is read.

    Parameters of the request: ``page``, and the parameters of the page in links to it.

    Returns
    -------
    dict
        ``lines``: picture or table -> a line, which imports what it needs.
    """
    return {"lines": PAGES[query.one_of("page", tuple(PAGES))](subject, query)}


def _report(subject: Subject) -> Iterator[Wanted]:
    steps = subject.run.steps if subject.run is not None else ()
    more = [*["compare"] * (subject.other is not None or len(steps) > 1), *["run"] * bool(steps)]
    for page in ("architecture", "ranks", *more):
        yield Wanted("python", {"page": page}, level=MORE)
    if len(steps) > 2:
        yield Wanted("python", {"page": "compare", "with": str(steps[0])}, level=MORE)


ENDPOINTS = {"python": python}
REPORT = _report

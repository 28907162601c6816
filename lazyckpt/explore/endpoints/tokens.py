"""``tensor/neighbours``: the rows of an embedding that are most alike to one, with the tokens of a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...errors import CorruptError, DataError, LazyckptError
from ...inspect.neighbours import neighbours as neighbours_of
from ...io.storage.base import Store
from ..query import Query
from ..subject import Subject

_DOCUMENT = 64 << 20  # bytes of a tokenizer's file that is read


def neighbours(subject: Subject, query: Query) -> dict[str, Any]:
    """Find the rows with the largest cosine to a row of a matrix.

    Parameters of the request: those of `Subject.tensor`. ``row``: its number; or ``token``: its text in the tokenizer
    (tokenizer.json or vocab.json beside the checkpoint). ``count``: how many.

    Returns
    -------
    dict
        ``row``, ``token`` (null if there is no tokenizer), and ``nearest``: triples of row, cosine and token.
    """
    t = subject.tensor(query)
    words = _words(t.operands[0].store) if t.operands else {}
    if "token" in query:
        found = [n for n, text in words.items() if text == query.text("token")]
        if not found:
            raise DataError(f"the tokenizer has no token {query.text('token')!r:.60}")
        row = found[0]
    else:
        row = query.number("row", 0, 0, max(0, t.shape[0] - 1) if t.ndim else 0)
    count = query.number("count", 20, 1, 200)
    nearest = neighbours_of(t, row, count, check=query.check)
    return {
        "row": row,
        "token": words.get(row),
        "nearest": [[one.row, one.cosine, words.get(one.row)] for one in nearest],
    }


def _words(store: Store) -> Mapping[int, str]:
    """Return the token of each number, by the files of a tokenizer; empty if there are none."""
    for path in ("tokenizer.json", "vocab.json"):
        try:
            size = store.stat(path).size
        except (LazyckptError, OSError):
            continue  # there is none
        if size > _DOCUMENT:
            raise DataError(f"{path} has {size:,} bytes: a tokenizer of up to {_DOCUMENT:,} bytes is read")
        try:
            about = json.loads(bytes(store.read(path, 0, size)))
            vocabulary = about["model"]["vocab"] if path == "tokenizer.json" else about
            if isinstance(vocabulary, list):  # Unigram: pairs of text and score
                found = {n: str(pair[0]) for n, pair in enumerate(vocabulary)}
            else:
                found = {int(n): str(text) for text, n in vocabulary.items()}
            added = about.get("added_tokens", ()) if path == "tokenizer.json" else ()
            return found | {int(one["id"]): str(one["content"]) for one in added}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as e:
            raise CorruptError(f"{path} beside the checkpoint is no tokenizer that is known: {e!r:.100}") from None
    return {}


ENDPOINTS = {"tensor/neighbours": neighbours}

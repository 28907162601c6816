"""The faults of servers and networks that reading a remote checkpoint is tested against, as one table.

``python -m tests.remote_faults`` writes it to docs/reference/remote-faults.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs/reference/remote-faults.md"
FINE, RETRIED = "read as usual", "read after retries"
STORES = ("s3", "gs", "az", "http")
OPERATIONS = ("open", "slice", "whole", "verify", "convert")


@dataclass(frozen=True)
class Fault:
    """What a server does wrong while a checkpoint is read."""

    what: str
    """The fault, as the page says it."""
    kind: str
    """One of those of tests/servers/faults.py."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of `set_fault`; it concerns all objects of the checkpoint unless they say otherwise."""
    outcome: str = RETRIED
    """`FINE`, `RETRIED`, or the name of the error."""
    says: str = ""
    """A regular expression that the error's message contains."""
    stores: tuple[str, ...] = STORES
    operations: tuple[str, ...] = OPERATIONS

    @property
    def id(self) -> str:
        return self.what.replace("/", " or ")


TWICE: dict[str, Any] = {"times": 2}
GET: dict[str, Any] = {"method": "GET"}
GONE = r"tried for \d+ s; storage_options"
OTHER = "not .* the range that was asked for"
PAGES = "a page instead|has a page there|not the answer of an object store"
CHANGED = "is not the file that was opened"
DENIED = "access is denied.*credentials"
SIGNLESS = ("s3", "gs", "http")  # Azure's requests are signed with their ranges, so no proxy can change them
BUSY = {"status": 503, "error": "SlowDown", "message": "Please reduce your request rate."}
BROKEN = {"status": 500, "error": "InternalError"}
MANY = {"status": 429, "error": "TooManyRequests"}
LATER = {"headers": {"Retry-After": "1"}}
B = {"object": "{folder}/run/b.safetensors"}
LOST, REFUSED, CHANGES = "MissingFileError", "FormatError|MissingFileError", "ChangedFileError"

FAULTS: tuple[Fault, ...] = (
    # connections
    Fault("two answers are slow", "slow", {"seconds": 0.3, **TWICE}, FINE),
    Fault("bytes arrive slowly", "trickle", {"seconds": 0.001, "size": 40_000, **GET}, FINE),
    Fault("two answers do not come", "hang", TWICE),
    Fault("no answer comes", "hang", {}, LOST, f"no answer came in time.*{GONE}"),
    Fault("two connections drop before the answer", "drop", TWICE),
    Fault("all connections drop before the answer", "drop", {}, LOST, f"the connection broke.*{GONE}"),
    Fault("two connections drop in the middle of the answer", "cut", {"after": 20, **GET, **TWICE}),
    Fault("all connections drop in the middle of the answer", "cut", {"after": 20, **GET}, LOST, GONE),
    # statuses
    Fault("429 with Retry-After, twice", "status", {**MANY, **LATER, **TWICE}),
    Fault("429 without Retry-After, twice", "status", {**MANY, **TWICE}),
    Fault("500, twice", "status", {**BROKEN, **TWICE}),
    Fault("503 with Retry-After, twice", "status", {**BUSY, **LATER, **TWICE}),
    Fault("429 with Retry-After, for ever", "status", {**MANY, **LATER}, LOST, f"429 Too Many Requests.*{GONE}"),
    Fault("500, for ever", "status", BROKEN, LOST, f"500 Internal Server Error.*{GONE}"),
    Fault("503, for ever", "status", BUSY, LOST, f"503 Service Unavailable.*{GONE}"),
    Fault("403", "status", {"status": 403, "error": "AccessDenied"}, LOST, DENIED),
    Fault("403, the token has expired", "token", {"good": "the-fresh-token"}, LOST, DENIED),
    Fault("a redirect, twice", "redirect", {"to": "{server}", **TWICE}, FINE, stores=("http",)),
    # answers that are not what was asked for
    Fault("two answers are too short, and their Content-Length says so", "short", {"by": 5, **GET, **TWICE}),
    Fault("all answers are too short, and their Content-Length says so", "short", {"by": 50_000, **GET}, LOST, GONE),
    Fault("two answers are of another range", "other_range", {"by": 7, **GET, **TWICE}, stores=SIGNLESS),
    Fault("all answers are of another range", "other_range", {"by": 7, **GET}, LOST, OTHER, stores=SIGNLESS),
    Fault("Content-Range names another range", "wrong_content_range", {"by": 3, **GET}, LOST, OTHER),
    Fault("Content-Range is missing", "no_content_range", GET, LOST, "not the answer of an object store"),
    Fault("ranges are ignored", "ignore_range", GET, REFUSED, "does not serve parts of files", stores=SIGNLESS),
    Fault("a page comes instead of each answer", "html", GET, REFUSED, PAGES),
    Fault("bodies are gzip, although nobody asked for it", "gzip", GET, LOST, "packed.*gzip"),
    # versions
    Fault("no ETag", "no_etag", {}, FINE, stores=("s3", "http"), operations=("open", "slice", "whole", "verify")),
    Fault("no ETag, of a store that always has one", "no_etag", {}, LOST, "not the answer", stores=("gs", "az")),
    Fault("another ETag in each answer", "new_etag", {}, CHANGES, CHANGED),
    Fault(
        "an object is replaced after the index was read", "replace", {**B, **TWICE}, CHANGES, CHANGED,
        operations=("slice", "whole", "convert"),
    ),
    Fault(
        "an object is replaced between two requests of a read", "replace",
        {"path": "{folder}/run/b.safetensors", "skip": 2, "times": 1}, CHANGES, CHANGED,
        operations=("whole", "convert"),
    ),
)  # fmt: skip


def page(faults: Iterable[Fault]) -> str:
    """Return the table of the page."""
    rows = ["| fault | stores | what happens |", "|---|---|---|"]
    for fault in faults:
        outcome = fault.outcome
        if outcome not in (FINE, RETRIED):
            outcome = " or ".join(f"`{name}`" for name in outcome.split("|"))
        rows.append(f"| {fault.what} | {', '.join(fault.stores)} | {outcome} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    PAGE.write_text(text[: text.index("| fault |")] + page(FAULTS), "utf-8")

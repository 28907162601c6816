"""A histogram of some of a tensor's elements, as bars."""

from __future__ import annotations

from ..sample import Sample
from .parts import safe, tag


def histogram_html(found: Sample) -> str:
    """The bars, what was read for them and what there is in it."""
    told, stats = found.lines
    top = max(found.counts, default=0)
    bars = "".join(
        tag(
            "span",
            "",
            "" if n else "none",
            style=f"height:{100 * n / top:.3g}%",
            title=f"{a:.4g} to {b:.4g}: {n:,}",
        )
        for n, a, b in zip(found.counts, found.edges[:-1], found.edges[1:], strict=True)
    )
    # attributes, not text: where styles are taken out there are no bars that they could be the ends of
    ends = tag("span", "", data_l=f"{found.low:.4g}") + " " + tag("span", "", data_l=f"{found.high:.4g}")
    drawn = tag("div", bars, "bars") + tag("div", ends, "ends", aria_hidden="true") if top else ""
    return drawn + tag("div", safe(told, 400), "note") + tag("div", safe(stats, 400), "note")

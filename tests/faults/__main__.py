"""Write docs/reference/faults.md from the table of faults."""

from __future__ import annotations

from pathlib import Path

from . import FAULTS, page

PAGE = Path(__file__).parents[2] / "docs/reference/faults.md"

if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    PAGE.write_text(text[: text.index("| fault |")] + page(FAULTS), "utf-8")

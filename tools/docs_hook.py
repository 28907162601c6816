"""A hook of mkdocs: CONTRIBUTING.md and CHANGELOG.md of the repository become pages of the site.

Links between these two files and docs/ are written as they work in the repository; here they are translated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Any, config: Any) -> Any:
    for source, page in PAGES.items():
        text = (ROOT / source).read_text("utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    up = "../" * page.file.src_uri.count("/")
    for source, target in PAGES.items():
        markdown = markdown.replace(f"]({up}../{source}", f"]({up}{target}").replace(f"]({source}", f"]({target}")
    return markdown

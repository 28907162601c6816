"""Draw the pictures in docs/pictures except overview.png: terminals, a notebook and plots of the demo's files.

    python tools/make_screenshots.py [NAME...]    # all, or some: demo, browse, ...

It needs lazyckpt's test extra and Chromium (``CHROMIUM`` names the program).
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text
from safetensors.torch import save_file

import lazyckpt
from lazyckpt import demo

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
CHROMIUM = os.environ.get("CHROMIUM", "chromium")
NAME = "model.layers.1.mlp.down_proj.weight"
PAGE = "<!doctype html><meta charset=utf-8><style>body {{margin: {margin}; background: {back}}}</style>{body}"
TERMINAL = (
    "<pre style=\"font: 15px/1.3 'DejaVu Sans Mono', monospace; color: #c5c8c6; margin: 0\"><code>{code}</code></pre>"
)


def shoot(body: str, target: Path, size: tuple[int, int], back: str = "white", margin: str = "0") -> None:
    """The body of a page as a PNG of this many pixels."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(PAGE.format(body=body, back=back, margin=margin), "utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/user"]
        where = [f"--screenshot={target}", f"--window-size={size[0]},{size[1]}", page.as_uri()]
        subprocess.run([CHROMIUM, *options, *where], check=True, capture_output=True)


def draw_demo(folder: Path, target: Path) -> None:
    """The beginning of `lazyckpt demo` on a terminal with colours."""
    env = os.environ | {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "lazyckpt", "demo", "--keep", "demo"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, encoding="utf-8", check=True)
    lines = done.stdout.splitlines()
    start = next(n for n, line in enumerate(lines) if "1. A checkpoint" in line)
    stop = next(n for n, line in enumerate(lines) if "# The same slice" in line)
    console = Console(record=True, width=112, file=open(os.devnull, "w"), force_terminal=True, color_system="truecolor")  # noqa: SIM115
    console.print(Text.from_ansi("\n".join(lines[start:stop])), soft_wrap=True)
    code = console.export_html(inline_styles=True, code_format="{code}", theme=SVG_EXPORT_THEME)
    count = stop - start
    shoot(TERMINAL.format(code=code), target, (1080, round(count * 19.5) + 28), "#292929", "16px 18px")


def draw_browse(folder: Path, target: Path) -> None:
    """`lazyckpt browse` with the values of a tensor."""
    shoot_browser(target, [folder / "zero3"], ["v"])


def draw_browse_heat(folder: Path, target: Path) -> None:
    """The heat map of a tensor."""
    shoot_browser(target, [folder / "zero3"], ["m", "a"])


def draw_browse_pair(folder: Path, target: Path) -> None:
    """A comparison: of the demo's weights with some that are rounded, and with one layer that was trained further."""
    view = lazyckpt.open(folder / "zero3")
    generator = torch.Generator().manual_seed(0)
    for name, wide in (("before", 1.0), ("after", 1.0005)):
        weights = {}
        for key, t in view.items():
            noise = torch.randn(t.shape, generator=generator) * t[...].float().std() * 0.3
            weights[key] = (t[...].float() * wide + (noise if ".1.mlp" in key and name == "after" else 0)).bfloat16()
        (folder / name).mkdir(exist_ok=True)
        save_file(weights, folder / name / "model.safetensors")
    shoot_browser(target, [folder / "before", folder / "after"], ["j", "e"], "")


def shoot_browser(target: Path, paths: list[Path], keys: list[str], name: str = NAME, theme: str = "") -> None:
    """A PNG of the browser after some keys, with the cursor at a tensor."""
    from lazyckpt.browse.app import Browser
    from lazyckpt.browse.detail import opening
    from lazyckpt.browse.subject import One, Pair, Subject

    def subject() -> Subject:
        views = [(lazyckpt.open(path), path) for path in paths]
        sides = [One(view, view, opening(path.name, {})) for view, path in views]
        return Subject(sides[0]) if len(sides) == 1 else Pair(sides[0], sides[1])

    app = Browser(subject, " and ".join(path.name for path in paths))

    async def go() -> str:
        async with app.run_test(size=(124, 34)) as pilot:

            async def settle() -> None:
                for _ in range(3):
                    await pilot.pause(0.1)
                    while app.busy:
                        await pilot.pause(0.01)
                await pilot.pause()

            await settle()
            if theme:
                app.theme = theme
            if name:
                app.filter.value = name
                await settle()
                app.names.focus()
                while app.row is None or app.row.start != name:
                    await pilot.press("right", "down")
                    await settle()
                app.filter.value = ""
            for key in keys:
                await settle()
                await pilot.press(key)
            await settle()
            return app.export_screenshot()

    svg = asyncio.run(go())
    width, height = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
    size = (1200, round(1200 * height / width))
    shoot(svg.replace("<svg ", f'<svg width="{size[0]}" height="{size[1]}" ', 1), target, size)


def draw_notebook(folder: Path, target: Path) -> None:
    """A view as a notebook shows it, with some of the tree open."""
    os.chdir(folder)
    html = lazyckpt.open("zero3")._repr_html_()
    script = """<script>
      for (const d of document.querySelectorAll("details")) {
        const text = d.querySelector("summary").textContent;
        d.open = !/^\\s*(0|self_attn)/.test(text) && !d.classList.contains("more");
      }
    </script>"""
    shoot(html + script, target, (940, 508), margin="14px")


def draw_norms(folder: Path, target: Path) -> None:
    save(lazyckpt.open(folder / "model").plot.norms().figure, target)


def draw_plots(folder: Path, target: Path) -> None:
    """The overview of a view."""
    save(lazyckpt.open(folder / "zero3").plot(), target)


def draw_tensor(folder: Path, target: Path) -> None:
    """The overview of a tensor."""
    save(lazyckpt.open(folder / "zero3")[NAME].plot(), target)


def save(figure: Any, target: Path) -> None:
    figure.savefig(target, dpi=100, metadata={"Software": None})


def main() -> int:
    import matplotlib

    matplotlib.use("Agg")
    drawings = {name[5:]: draw for name, draw in globals().items() if name.startswith("draw_")}
    with tempfile.TemporaryDirectory() as folder:
        demo.write(Path(folder))
        for name in sys.argv[1:] or drawings:
            target = FOLDER / f"{name}.png"
            drawings[name](Path(folder), target)
            print(f"{target}: {target.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

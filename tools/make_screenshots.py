"""Draw the pictures in docs/pictures except overview.png: terminals, a notebook, plots and the explorer.

    python tools/make_screenshots.py [NAME...]    # all, or some: demo, browse, explore, ...

They show the demo's files, small models that DeepSpeed and transformers write, and a recorded checkpoint. Those of the
explorer are drawn twice, as light and as dark pages (``NAME-dark.png``). The tool needs lazyckpt's test extra, Chromium
(``CHROMIUM`` names the program) and, for the explorer, its chromedriver; for ``explore-notebook`` also
``pip install jupyterlab``.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
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
SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # the sizes of models that are written for pictures
# Whether a page of the explorer has loaded what it shows.
READY = """document.querySelector('h2, [role=tree]') && [...document.querySelectorAll('.quiet, [role=status]')].every(
    (one) =>
    one.getBoundingClientRect().bottom > innerHeight || !/ing\\b.*…$/.test(one.textContent.trim()))"""
# Takes a folder out of all paths that a page shows.
SHORTEN = """const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) walk.currentNode.data = walk.currentNode.data.replaceAll(arguments[0], "");"""
TOKEN = "0123456789abcdef"  # of JupyterLab, for this machine
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
    console = Console(record=True, width=160, file=open(os.devnull, "w"), force_terminal=True, color_system="truecolor")  # noqa: SIM115
    console.print(Text.from_ansi("\n".join(lines[start:stop])), soft_wrap=True)
    code = console.export_html(inline_styles=True, code_format="{code}", theme=SVG_EXPORT_THEME)
    width = max(map(len, Text.from_ansi("\n".join(lines[start:stop])).plain.splitlines()))
    size = (round(width * 9.04) + 36, round((stop - start) * 19.5) + 28)
    shoot(TERMINAL.format(code=code), target, size, "#292929", "16px 18px")


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
    """A PNG of the browser on a terminal with all colours, after some keys, with the cursor at a tensor."""
    from lazyckpt.browse.app import Browser
    from lazyckpt.browse.detail import opening
    from lazyckpt.browse.subject import One, Pair, Subject

    os.environ |= {"COLORTERM": "truecolor", "TERM": "xterm-256color"}

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
    save(lazyckpt.open(folder / "zero3").plot.norms().figure, target)


def draw_plots(folder: Path, target: Path) -> None:
    """The overview of a view."""
    save(lazyckpt.open(folder / "zero3").plot(), target)


def draw_tensor(folder: Path, target: Path) -> None:
    """The overview of a tensor."""
    save(lazyckpt.open(folder / "zero3")[NAME].plot(), target)


def draw_explore(folder: Path, target: Path) -> None:
    """The explorer with a tensor: its values, and the ranks that hold them."""
    shoot_explorer(folder, "zero3", f"tensor?name={NAME}", target, 795)


def draw_explore_tree(folder: Path, target: Path) -> None:
    """The page of all tensors, with the norms and the card of the layers."""

    def norms(driver: Any) -> None:
        wait_for(driver, "document.querySelector('[role=treeitem]')")
        driver.execute_script("[...document.querySelectorAll('button')].find(b => /norm/i.test(b.textContent)).click()")
        wait_for(driver, "document.querySelector('.tree-norm')")

    write_zero3(folder / "gpt")
    shoot_explorer(folder, "gpt", f"tree?name={NAME}", target, 760, norms)


def draw_explore_tensor(folder: Path, target: Path) -> None:
    """The page of one tensor."""
    shoot_explorer(folder, "zero3", f"tensor?name={NAME}", target, 1290)


def draw_explore_values(folder: Path, target: Path) -> None:
    """What the page of an embedding has below its heat map: bits, singular values, the nearest rows."""
    write_experts(folder / "moe")

    def nearest(driver: Any) -> None:
        wait_for(driver, "document.querySelector('[aria-label=\"Nearest rows\"] form')")
        driver.execute_script("document.querySelector('[aria-label=\"Nearest rows\"] form').requestSubmit()")
        wait_for(driver, "document.querySelector('[aria-label=\"nearest rows\"] [role=cell]')")
        wait_for(driver, "document.querySelector('[aria-label^=\"singular values\"]')")
        driver.execute_script(
            "document.querySelectorAll('.tensor-cards > *')[2].scrollIntoView();"
            " document.querySelector('main').scrollBy(0, -14)"
        )

    shoot_explorer(folder, "moe", "tensor?name=model.embed_tokens.weight&view=97,129,0,64", target, 1000, nearest)


def draw_explore_heads(folder: Path, target: Path) -> None:
    """One attention head in the page of its tensor."""
    write_experts(folder / "moe")
    name = NAME.replace("mlp.down_proj", "self_attn.q_proj")

    def head(driver: Any) -> None:
        label = "[...document.querySelectorAll('.tensor-tools label')].find(one => /^attention/.test(one.textContent))"
        wait_for(driver, label)
        driver.execute_script(
            f"const select = {label}.querySelector('select'); select.value = '1';"
            " select.dispatchEvent(new Event('change', {bubbles: true}))"
        )
        wait_for(driver, "location.hash.includes('view=')")

    shoot_explorer(folder, "moe", f"tensor?name={name}", target, 765, head)


def draw_explore_beside(folder: Path, target: Path) -> None:
    """A weight and its moments side by side."""
    shoot_explorer(folder, "zero3", f"tensor?name={NAME}&beside=exp_avg,exp_avg_sq", target, 760)


def draw_explore_architecture(folder: Path, target: Path) -> None:
    """The page of the architecture."""
    shoot_explorer(folder, "zero3", "architecture", target, 900)


def draw_explore_ranks(folder: Path, target: Path) -> None:
    """The page of the ranks, of a recorded checkpoint that has lost a file."""
    recording = FOLDER.parents[1] / "tests" / "golden" / "deepspeed_kinds" / "megatron_3d_even_dp2.tar.xz"
    with tarfile.open(recording) as archive:
        archive.extractall(folder, filter="data")
    (folder / "megatron_3d_even_dp2" / "ckpt").rename(folder / "gpt-3d")
    next(folder.glob("gpt-3d/*/bf16_zero_pp_rank_1_mp_rank_02_optim_states.pt")).unlink()
    shoot_explorer(folder, "gpt-3d", "ranks", target, 770)


def draw_explore_optimizer(folder: Path, target: Path) -> None:
    """The page of the optimizer."""
    write_zero3(folder / "gpt")
    shoot_explorer(folder, "gpt", "optimizer", target, 1000)


def draw_explore_experts(folder: Path, target: Path) -> None:
    """The page of the experts."""
    write_experts(folder / "moe")
    shoot_explorer(folder, "moe", "experts", target, 900)


def draw_explore_compare(folder: Path, target: Path) -> None:
    """The page of a comparison: of the first and the last step of a run."""
    write_run(folder / "run")
    shoot_explorer(folder, "run/checkpoint-1", "compare", target, 1000, other="run/checkpoint-32")


def draw_explore_run(folder: Path, target: Path) -> None:
    """The page of a run."""
    write_run(folder / "run")
    shoot_explorer(folder, "run", "run?quantity=drift", target, 900)


def draw_explore_report(folder: Path, target: Path) -> None:
    """A report, which is one file, without a server."""
    os.chdir(folder)
    lazyckpt.open("zero3").report("report.html")
    for driver, theme in drivers(1280, 620):
        driver.get(f"{(folder / 'report.html').as_uri()}#/tensor?name={NAME}")
        wait_for(driver, READY)
        keep(driver, folder, target, theme)


def draw_explore_notebook(folder: Path, target: Path) -> None:
    """The widget in JupyterLab, with one of its pages."""
    with jupyterlab(folder, 'lazyckpt.open("zero3").widget(height=520)') as address:
        for driver, theme in drivers(1040, 740):
            driver.get(f"{address}/lab/tree/picture.ipynb?token={TOKEN}&reset")
            wait_for(driver, "document.querySelector('.jp-Notebook .jp-Cell')", 120)
            wait_for(driver, "document.querySelector('.jp-Notebook-ExecutionIndicator[data-status=idle]')", 60)
            for command, args in (
                ("apputils:change-theme", {"theme": f"JupyterLab {theme.title()}"}),
                ("application:toggle-left-area", {}),
                ("notebook:run-all-cells", {}),
            ):
                driver.execute_script("window.jupyterapp.commands.execute(...arguments)", command, args)
                time.sleep(1)
            wait_for(driver, "document.querySelector('.jp-OutputArea [role=treeitem]')", 120)
            driver.execute_script("document.querySelectorAll('[class*=Toastify]').forEach(one => one.remove())")
            keep(driver, folder, target, theme)


@contextmanager
def jupyterlab(folder: Path, code: str) -> Iterator[str]:
    """The address of a JupyterLab with a notebook of one cell."""
    cell = {"cell_type": "code", "id": "one", "source": f"import lazyckpt\n\n{code}", "metadata": {}, "outputs": []}
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    book = {"cells": [cell | {"execution_count": None}], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (folder / "picture.ipynb").write_text(json.dumps(book))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1"]
    command += [f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder}", "--expose-app-in-browser"]
    own = {"JUPYTER_CONFIG_DIR": f"{folder}/config", "JUPYTER_DATA_DIR": f"{folder}/data"}
    env = {**os.environ, **own, "PYTHONPATH": str(Path(lazyckpt.__file__).parents[1])}
    with (folder / "lab.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        while process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()  # it asks whether to stop
        process.wait()


def write_experts(folder: Path) -> None:
    """A small mixture-of-experts model of transformers, after a few steps of AdamW, with a vocabulary of bytes."""
    transformers: Any = import_module("transformers")

    if folder.exists():
        return
    experts = {"num_hidden_layers": 8, "num_local_experts": 16, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, **experts))
    train(model, 8)
    model.bfloat16().save_pretrained(folder)
    words = {chr(n) if 32 < n < 127 else f"<0x{n:02X}>": n for n in range(SMALL["vocab_size"])}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": []}))


def write_zero3(folder: Path) -> None:
    """A small Llama that the notebooks' writer trains with ZeRO-3 on four ranks, unless it is there."""
    notebooks = FOLDER.parents[1] / "notebooks"
    if folder.exists():
        return
    sys.path.insert(0, str(notebooks))
    try:
        checkpoints: Any = import_module("checkpoints")
        checkpoints.write("deepspeed", str(folder), ranks=4, stage=3, steps=30)
    finally:
        sys.path.remove(str(notebooks))


def write_run(folder: Path) -> None:
    """The folder of a run of a small Llama, with six checkpoints, unless it is there."""
    transformers: Any = import_module("transformers")

    if folder.exists():
        return
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_hidden_layers=8))
    done = 0
    for step in (1, 2, 4, 8, 16, 32):
        train(model, step - done)
        done = step
        model.save_pretrained(folder / f"checkpoint-{step}")


def train(model: Any, steps: int) -> None:
    """Change a model by some steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        tokens = (torch.rand(4, 32).square() * SMALL["vocab_size"]).long()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def shoot_explorer(
    folder: Path,
    source: str,
    link: str,
    target: Path,
    height: int,
    then: Callable[[Any], None] = lambda driver: None,
    other: str | None = None,
) -> None:
    """PNGs of a page of the explorer, 1,280 pixels wide, light and dark."""
    os.chdir(folder)  # the page shows the path
    with lazyckpt.serve(source, other) as server:
        for driver, theme in drivers(1280, height):
            driver.get(server.url)  # sets the cookie
            driver.get(f"{server.url.partition('?')[0]}#/{link}")
            then(driver)
            wait_for(driver, READY)
            keep(driver, folder, target, theme)


def drivers(width: int, height: int) -> Iterator[tuple[Any, str]]:
    """A browser with a window of this many pixels that prefers light pages, and then one that prefers dark pages."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    for theme in ("light", "dark"):
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which(CHROMIUM) or CHROMIUM
        for flag in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--force-color-profile=srgb",
        ):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            media = [{"name": "prefers-color-scheme", "value": theme}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            yield driver, theme
        finally:
            driver.quit()


def keep(driver: Any, folder: Path, target: Path, theme: str) -> None:
    """Save what a browser shows, without the folder's path. The dark one has a name of its own."""
    driver.execute_script(SHORTEN, f"{folder.resolve()}/")
    time.sleep(1)  # canvases are drawn in the next frames
    driver.save_screenshot(str(target if theme == "light" else dark(target)))


def dark(target: Path) -> Path:
    return target.with_name(f"{target.stem}-dark.png")


def wait_for(driver: Any, condition: str, seconds: float = 30) -> None:
    """Wait until an expression of JavaScript is true."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, seconds).until(lambda one: one.execute_script(f"return {condition}"))


def save(figure: Any, target: Path) -> None:
    figure.savefig(target, dpi=100, metadata={"Software": None})


def lighten(target: Path) -> None:
    """Keep at most 256 colours of a PNG, which makes the file a third; of the many of the explorer 96.

    The most frequent colours, such as that of the paper, stay exactly as they are.
    """
    import numpy as np
    from PIL import Image

    picture = Image.open(target).convert("RGB")
    count = 96 if target.name.startswith("explore") else 256
    found = picture.quantize(count, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    colours, first, often = np.unique(np.asarray(picture).reshape(-1, 3), axis=0, return_index=True, return_counts=True)
    entries = np.asarray(found).ravel()[first]
    palette = np.asarray(found.getpalette(), "uint8").reshape(-1, 3).copy()
    for n in often.argsort()[-16:]:  # the most frequent one last
        palette[entries[n]] = colours[n]
    found.putpalette(palette.ravel().tolist())
    found.save(target, optimize=True)


def main() -> int:
    os.environ["MPLBACKEND"] = "Agg"
    drawings = {
        name[5:].replace("explore_", "explore-"): draw for name, draw in globals().items() if name.startswith("draw_")
    }
    with tempfile.TemporaryDirectory() as folder:
        demo.write(Path(folder))
        for name in sys.argv[1:] or drawings:
            if name == "explore-notebook" and find_spec("jupyterlab") is None:
                print("explore-notebook stays as it is: it needs jupyterlab", file=sys.stderr)
                continue
            target = FOLDER / f"{name}.png"
            drawings[name](Path(folder), target)
            for one in (target, dark(target)):
                if one.exists():
                    lighten(one)
                    print(f"{one}: {one.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

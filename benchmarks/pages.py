"""The explorer's tree in Chromium: the processor time of its page, which holds while others use the machine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .contest import Skipped
from .sample import Sample

_HELD = """
const whole = Response.prototype.arrayBuffer;
window.answered = new Promise(tell => {
  Response.prototype.arrayBuffer = async function() {
    const body = await whole.call(this);
    if (/\\/tree(\\?|$)/.test(this.url)) { tell(); await new Promise(go => window.release = go); }
    return body;
  };
});
"""
_PAINT = """
const done = arguments[0];
const look = () => requestAnimationFrame(
  document.querySelector("[role=treeitem]") ? () => setTimeout(done) : look);
look();
window.release();
"""
_KEY = """
const [text, done] = arguments;
const field = document.querySelector("input[type=search]");
Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(field, text);
field.dispatchEvent(new InputEvent("input", {bubbles: true}));
requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done)));
"""
TYPED = ("weight", "experts 17", "*.part_3.weight")


class Page:
    """A tree in a browser. Its answer is held back until what it costs the page is measured."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url
        driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _HELD})

    def _spent(self) -> float:
        """Seconds of processor time of the page's thread."""
        found = self.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return float(next(one["value"] for one in found if one["name"] == "TaskDuration"))

    def first_paint(self, calls: int = 1) -> Sample:
        """From the answer with all names until the tree is painted."""
        self.driver.get("about:blank")
        self.driver.get(self.url)
        self.driver.execute_async_script("window.answered.then(arguments[0])")
        start = self._spent()
        self.driver.execute_async_script(_PAINT)
        return Sample(self._spent() - start, {})

    def key(self, calls: int = 1) -> Sample:
        """The slowest key of some searches, from the event until what it finds is painted."""
        if not self.driver.execute_script("return document.querySelector('[role=treeitem]')"):
            self.first_paint()
            time.sleep(1)  # what the page prepares when nobody types
        slowest = 0.0
        for text in TYPED:
            for end in range(1, len(text) + 1):
                start = self._spent()
                self.driver.execute_async_script(_KEY, text[:end])
                slowest = max(slowest, self._spent() - start)
        return Sample(slowest, {})


@contextmanager
def opened(url: str) -> Iterator[Page]:
    """The page in a Chromium without a window."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    through = shutil.which("chromedriver")
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        raise Skipped("selenium is not installed") from None
    if program is None or through is None:
        raise Skipped("Chromium or its driver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(through))
    try:
        yield Page(driver, url)
    finally:
        driver.quit()

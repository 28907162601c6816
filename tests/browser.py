"""A headless Chromium that looks at HTML, in either theme, and tells of errors and of whatever it would fetch."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Browser", "chromium", "running", "until"]

PATIENCE = 120.0  # seconds; a busy machine takes long to draw a page

FRAME = "<!doctype html><html><head><meta charset='utf-8'><title>notebook</title></head><body{}>{}</body></html>"


class Browser:
    """``driver``: selenium's; ``folder``: where pages lie; ``shots``: where screenshots go."""

    def __init__(self, driver: Any, folder: Path, shots: Path) -> None:
        self.driver = driver
        self.folder = folder
        self.shots = shots

    def show(self, html: str, theme: str = "light", body: str = "", width: int = 1000) -> None:
        """Open a page with this body. ``theme``: what the system prefers; ``body``: attributes of the element."""
        page = self.folder / "page.html"
        page.write_text(FRAME.format(f" {body}" if body else "", html), "utf-8")
        media = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(page.as_uri())

    def js(self, code: str, *args: Any) -> Any:
        return self.driver.execute_script(code, *args)

    def all(self, css: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", css))

    def shot(self, name: str) -> Path:
        """Keep a picture of the whole page."""
        height = self.js("return document.documentElement.scrollHeight")
        width = self.js("return window.innerWidth")
        metrics = {"width": width, "height": min(height + 16, 4000), "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        path = self.shots / f"{name}.png"
        assert self.driver.save_screenshot(str(path))
        return path

    def complaints(self) -> list[str]:
        """What the console says, and what was requested besides the page itself, since it was opened."""
        found = [entry["message"] for entry in self.driver.get_log("browser")]
        for entry in self.driver.get_log("performance"):
            sent = re.search(r'"method":"Network.requestWillBeSent".*?"request":\{.*?"url":"([^"]*)"', entry["message"])
            if sent and not sent[1].endswith("/page.html"):
                found.append(f"requested {sent[1]}")
        return found


def chromium() -> tuple[str, str]:
    """The browser and its driver, or the test is skipped."""
    pytest.importorskip("selenium", reason="selenium, which drives the browser, is not installed")
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if not browser or not driver:
        pytest.skip("Chromium and its driver are not installed (Debian: apt-get install chromium chromium-driver)")
    return browser, driver


def until(browser: Browser, code: str) -> Any:
    """Wait until a JavaScript expression is true, and return its value."""
    from selenium.webdriver.support.ui import WebDriverWait

    waiting = WebDriverWait(browser.driver, PATIENCE, poll_frequency=0.05)
    return waiting.until(lambda driver: driver.execute_script(f"return {code}"), code)


@contextmanager
def running(folder: Path, profile: Path, *flags: str) -> Iterator[Browser]:
    """A browser that is closed in the end. ``LAZYCKPT_SCREENSHOTS``: where its pictures are kept, else ``folder``.

    ``flags``: further options of Chromium.
    """
    binary, chromedriver = chromium()
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    for flag in flags:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    shots = Path(os.environ.get("LAZYCKPT_SCREENSHOTS") or folder / "screenshots")
    shots.mkdir(parents=True, exist_ok=True)
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    try:
        yield Browser(driver, folder, shots)
    finally:
        driver.quit()

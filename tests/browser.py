"""Debian's Chromium without a window, driven by its chromedriver over WebDriver: opens a page, runs scripts in it, and
takes pictures of it. Nothing is downloaded; the browser reaches no network.

`benchmarks/pictures/screenshots.py` uses it, too.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Browser", "browser_missing", "open_browser"]

_OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
_NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND"


def browser_missing() -> str | None:
    """Return the program that is missing for a browser, with the command that brings it; None where all are there."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {absent[0]}: apt-get install chromium chromium-driver" if absent else None


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Yield a browser, and end it with its driver."""
    with subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            line = next(line for line in driver.stdout if "started successfully on port" in line)
            browser = Browser(f"http://127.0.0.1:{line.split()[-1].rstrip('.')}")
            try:
                yield browser
            finally:
                browser.ask("DELETE", "")
        finally:
            driver.terminate()


class Browser:
    """Session of a browser. driver: address of its chromedriver."""

    def __init__(self, driver: str) -> None:
        self._address = f"{driver}/session"
        options = {"goog:chromeOptions": {"args": [*_OPTIONS, _NO_NETWORK]}, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self.ask("POST", "", {"capabilities": {"alwaysMatch": options}})
        self._address += f"/{session['sessionId']}"

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Send a WebDriver command; return the value of its answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._address}{path}", data, {"Content-Type": "application/json"})
        request.method = method
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from error

    def look(self, width: int, dark: bool = False) -> None:
        """Set the width of the window in pixels, and the system's colours."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self._tools("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._tools("Emulation.setEmulatedMedia", {"features": [scheme]})

    def show(self, page: Path) -> None:
        """Open a file, unfold all its parts, and wait until its pictures are drawn."""
        self.ask("POST", "/url", {"url": page.resolve().as_uri()})
        self.run("document.querySelectorAll('details').forEach((part) => { part.open = true; });")
        waiting = (
            "return [...document.querySelectorAll('.plot')].filter((place) => !place.querySelector('.main-svg')).length"
        )
        for _ in range(300):
            if self.run(waiting) == 0:
                return
            time.sleep(0.1)
        raise RuntimeError(f"{self.run(waiting)} pictures of {page} were not drawn within 30 s")

    def run(self, script: str) -> Any:
        """Return what a script's `return` gives."""
        return self.ask("POST", "/execute/sync", {"script": script, "args": []})

    def complaints(self) -> list[str]:
        """Return the messages of errors and refused requests since the last call."""
        return [entry["message"] for entry in self.ask("POST", "/se/log", {"type": "browser"})]

    def picture(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        width, height = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        answer = self._tools("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        path.write_bytes(base64.b64decode(answer["data"]))

    def _tools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self.ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

"""A headless Chromium, driven by its own chromedriver over WebDriver (https://www.w3.org/TR/webdriver2/)."""

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

__all__ = ["Browser", "browser_at"]

WITHIN_S: Final = 30.0
FLAGS: Final = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--force-color-profile=srgb",
)  # fmt: skip
"""It shows one page of this machine and asks no other host."""


class Browser:
    """One window."""

    def __init__(self, url: str) -> None:
        self._url = url

    def _call(self, method: str, path: str, body: object | None = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
            return json.load(answer)["value"]

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def resize(self, width: int, height: int) -> None:
        self._call("POST", "/window/rect", {"width": width, "height": height})

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        return self._call("POST", "/execute/sync", {"script": f"return {script}", "args": []})

    def click(self, selector: str) -> None:
        """Click in the middle of the first element that matches, as a mouse does."""
        element = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{next(iter(element.values()))}/click", {})

    def wait(self, condition: Callable[["Browser"], object]) -> None:
        """Wait until `condition(self)` is true. Raises `TimeoutError`."""
        end = time.monotonic() + WITHIN_S
        while not condition(self):
            if time.monotonic() > end:
                raise TimeoutError(self.run("document.body.innerText"))
            time.sleep(0.1)

    def console_errors(self) -> list[str]:
        """Errors of scripts, and requests that the page's own policy refused."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def screenshot(self, file: Path) -> bytes:
        """The window as a PNG, also written to `file`."""
        png = base64.b64decode(self._call("GET", "/screenshot"))
        file.write_bytes(png)
        return png


@contextmanager
def browser_at(url: str, profile: Path, width: int = 1400, height: int = 1500) -> Iterator[Browser]:
    """A browser that shows `url`. `profile`: an empty folder."""
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    assert driver, "needs chromedriver: apt-get install chromium-driver"
    assert chromium, "needs chromium: apt-get install chromium"
    process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "started successfully on port" in line)
        base = "http://127.0.0.1:" + line.rpartition("port")[2].strip(" .\n")
        options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options,
                                  "goog:loggingPrefs": {"browser": "ALL"}}}  # fmt: skip
        session = Browser(base)._call("POST", "/session", {"capabilities": wanted})["sessionId"]
        browser = Browser(f"{base}/session/{session}")
        try:
            browser.resize(width, height)
            browser.open(url)
            yield browser
        finally:
            browser._call("DELETE", "")
    finally:
        process.terminate()
        process.wait(WITHIN_S)

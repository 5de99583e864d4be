"""The page in a real browser: it draws a swarm, is clicked, goes back in time, and outlives its process.

`MONITOR_PICTURES=FOLDER` keeps the screenshots, which is how those of docs/monitor.md were made.
"""

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser_kit import Browser, browser_at

pytestmark = pytest.mark.slow

DRAWN = "document.querySelectorAll('#nodes .node').length"


@contextmanager
def served(nodes: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL of the page of a made-up swarm, and the process that serves it."""
    command = [sys.executable, "-m", "scenarios.bench.monitor", "--serve", str(nodes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield next(line.strip() for line in process.stdout if line.startswith("http")), process
    finally:
        process.kill()
        process.wait()


def picture(browser: Browser, tmp_path: Path, name: str) -> tuple[int, int]:
    """Take a screenshot; its width and height in pixels."""
    png = browser.screenshot(Path(os.environ.get("MONITOR_PICTURES", tmp_path)) / name)
    return struct.unpack(">II", png[16:24])


@pytest.mark.parametrize("nodes", [1, 64])
def test_a_swarm_is_drawn_and_clicked(tmp_path: Path, nodes: int):
    with served(nodes) as (url, _), browser_at(url, tmp_path / "profile") as browser:
        browser.wait(lambda page: page.run(DRAWN) == nodes + 1)  # the trainer is drawn, too
        assert browser.run("document.getElementById('headline').textContent").endswith(".")
        assert browser.run("document.querySelectorAll('#members tr').length") == nodes
        assert browser.run("document.querySelectorAll('#versions g').length") == 14
        browser.wait(lambda page: page.run("state.seen.status.pieces.have.some(share => share > 0)"))
        assert picture(browser, tmp_path, f"page-{nodes}.png")[0] >= 1300
        browser.click("#stripes button:nth-child(3)")  # one stripe
        assert browser.run("state.stripe") == 1
        assert browser.run("document.querySelectorAll('#trees g:first-child path').length") == nodes
        browser.click("#members tr")
        slot = browser.run("state.picked")
        assert browser.run(f"state.seen.status.nodes.find(node => node.slot === {slot}).name") in browser.run(
            "document.getElementById('detailcard').textContent"
        )
        picture(browser, tmp_path, f"page-{nodes}-stripe.png")
        assert browser.console_errors() == []


def test_time_goes_back_and_the_page_says_when_its_process_is_gone(tmp_path: Path):
    with served(4) as (url, process), browser_at(url, tmp_path / "profile") as browser:
        browser.wait(lambda page: page.run("state.history.length") >= 2)
        browser.run("(() => { const scrub = document.getElementById('scrub'); scrub.value = 0;"
                    " scrub.dispatchEvent(new Event('input')); })()")  # fmt: skip
        browser.wait(lambda page: not page.run("state.live") and page.run("state.seen.at === state.history[0].at"))
        assert "min ago" in browser.run("document.getElementById('when').textContent")
        browser.click("#live")
        browser.wait(lambda page: page.run("state.live && state.seen.at > state.history[0].at"))
        process.kill()
        browser.wait(lambda page: "does not answer" in page.run("document.getElementById('findings').textContent"))
        assert browser.run(DRAWN) == 5  # as it was


def test_what_peers_say_is_text_and_never_markup(tmp_path: Path):
    """A member chooses its own name."""
    with served(2) as (url, _), browser_at(url, tmp_path / "profile") as browser:
        browser.wait(lambda page: page.run(DRAWN) == 3)
        browser.run(
            "(() => { const seen = structuredClone(state.seen); state.live = false;"
            " seen.status.nodes[0].name = '<img src=x onerror=\"window.hacked=1\">';"
            " seen.findings = [{what: '<b>bold</b>', todo: '', about: 0}]; state.seen = seen; draw(); })()"
        )
        assert browser.run("document.querySelectorAll('#members img, #trees img, #findings b').length") == 0
        assert "<img" in browser.run("document.getElementById('members').textContent")
        assert browser.run("window.hacked === undefined")

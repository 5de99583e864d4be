"""The gateway and `status --watch` survive a restart of their seed."""

import json
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from http.client import RemoteDisconnected
from pathlib import Path

import pytest
from kit import checkpoint, weights

from node import Swarm as Trainer
from node.host.port import free_port
from scenarios.harness.processes import PATIENCE_S
from scenarios.harness.swarm import Swarm, swarm_in


def get(url: str) -> tuple[int, dict[str, str], bytes]:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def until_status(url: str, status: int) -> tuple[dict[str, str], bytes]:
    """Repeat the request until the answer has this status. Until then only 200 and 503 may come, and no refusal."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            found, headers, body = get(url)
        except (ConnectionResetError, RemoteDisconnected):  # the seed died during this request
            continue
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionResetError):
                raise
            continue
        assert found in (200, 503)
        if found == status:
            return headers, body
        time.sleep(0.05)
    pytest.fail(f"{url} was never answered with {status}")


def until_closed(url: str) -> None:
    """The seed closes its own copy of the listening socket a moment after the trainer has gone."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=PATIENCE_S).close()
        except (urllib.error.URLError, ConnectionError):
            return
        time.sleep(0.05)
    pytest.fail(f"{url} is still answered")


def restarted(swarm: Swarm, base: Path, *urls: str) -> None:
    """Kill the seed, check that clients get 503 with Retry-After, restart it, and check that they are served."""
    swarm.signal("seed", signal.SIGKILL)
    for url in urls:
        until_status(url, 503)  # this request may have been with the seed as it ended
        headers, body = until_status(url, 503)
        assert headers["Retry-After"] == "2"
        assert "seed of this swarm is away" in json.loads(body)["error"]["message"]
        data = json.dumps({"model": "policy", "prompt": "x" * 300_000}).encode()
        path = url.replace("/models", "/completions")
        request = urllib.request.Request(path, data, {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(request, timeout=PATIENCE_S)
        assert raised.value.code == 503
    swarm.seed(base)
    for url in urls:
        assert json.loads(until_status(url, 200)[1])["data"][0]["id"] == "policy"


@pytest.mark.slow
def test_the_gateway_outlives_its_seed(tmp_path: Path) -> None:
    base, port = checkpoint(tmp_path / "base", weights(2)), free_port()
    with swarm_in(tmp_path) as swarm:
        swarm.seed(base)
        swarm.start("gateway", "gateway", "--home", str(swarm.home("seed")), "--at", f"127.0.0.1:{port}", "--json")
        swarm.until_logged("gateway", f"http://127.0.0.1:{port}/v1")
        with Trainer.attach(home=swarm.home("seed"), start=False) as trainer:
            own = trainer.openai_url
            for _ in range(2):
                restarted(swarm, base, f"http://127.0.0.1:{port}/v1/models", f"{own}/models")
            assert trainer.openai_url == own
        swarm.until_logged("gateway", "has ended. New requests get 503")
        swarm.until_logged("gateway", "is served again")
        until_closed(f"{own}/models")
        assert swarm.signal("gateway", signal.SIGINT) == 130
        taken = swarm.command("other", "gateway", "--home", str(tmp_path / "none"), "--at", f"127.0.0.1:{port}")
        assert (taken.code, "No seed serves" in taken.err) == (3, True), taken


def test_an_address_in_use_is_reported(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        swarm.seed(checkpoint(tmp_path / "base", weights(2)))
        home = ("--home", str(swarm.home("seed")))
        swarm.start("gateway", "gateway", *home, "--at", "127.0.0.1:0", "--json")
        swarm.until_logged("gateway", '"model"')
        address = json.loads(swarm.log("gateway"))["url"].removeprefix("http://").removesuffix("/v1")
        ended = swarm.command("other", "gateway", *home, "--at", address)
        assert (ended.code, "cannot listen on" in ended.err) == (2, True), ended


@pytest.mark.slow
def test_a_live_status_shows_that_its_seed_is_away_and_continues(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", weights(2))
    with swarm_in(tmp_path) as swarm:
        swarm.seed(base)
        words = ("status", "--watch")
        for again in (False, True):
            watching = swarm.piped("seed", *words, FORCE_COLOR="1", TERM="xterm", COLUMNS="300")
            _read_until(watching, rb"head")
            swarm.signal("seed", signal.SIGKILL)
            _read_until(watching, rb"has not answered for")
            if again:
                swarm.seed(base)
                _read_until(watching, rb"(?s)swarm [^\n]*head((?!has not answered).)*swarm [^\n]*head")
            watching.send_signal(signal.SIGINT)
            assert watching.wait(PATIENCE_S) == 130
            if not again:
                swarm.seed(base)


def _read_until(process: "subprocess.Popen[bytes]", pattern: bytes) -> bytes:
    """The output of the process up to a match of `pattern`."""
    assert process.stdout is not None
    shown, deadline = b"", time.monotonic() + PATIENCE_S
    while not re.search(pattern, shown):
        assert time.monotonic() < deadline, shown
        assert process.poll() is None, (shown, process.stderr.read() if process.stderr else b"")
        shown += process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
    return shown

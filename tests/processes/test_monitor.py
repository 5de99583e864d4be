"""What real processes show: a seed and a relay with `--metrics`, and `swarm-node page` of another process."""

import json
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from scenarios.harness.processes import next_line
from scenarios.harness.swarm import LOOPBACK, Swarm, swarm_in

pytestmark = pytest.mark.slow


def get(url: str, path: str = "") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url + path, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def look(url: str) -> dict[str, Any]:
    return json.loads(get(url, "api/status")[1])


def page_of(swarm: Swarm, name: str) -> str:
    """The URL that the process logs."""
    swarm.until_event(name, "monitor")
    return re.findall(r'"page": "([^"]+)"', swarm.log(name, 1 << 20))[0]


def test_a_seed_and_a_relay_show_a_version_and_a_page_outlives_its_process(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        swarm.seed(None, "--raw-mb", "2", "--metrics", "0")
        seed = page_of(swarm, "seed")
        assert look(seed)["headline"] == "Version 0 is sealed, and no node has joined yet."
        swarm.start("box", "relay", swarm.ticket(), *LOOPBACK, "--name", "box", "--metrics", "0")
        box = page_of(swarm, "box")
        swarm.until("box", lambda state: state["nodes"][0]["standing"] == "fresh")
        file = tmp_path / "file"
        file.write_bytes(bytes(range(256)) * 4096)
        swarm.publish(file, "--raw", "--wait")

        seen = look(seed)
        assert seen["headline"].startswith("box has version 1, ")
        assert seen["findings"] == []
        assert set(seen["status"]["pieces"]["giver"]) == {0}
        metrics = get(seed, "metrics")[1]
        for line in ('swarm_members{standing="fresh"} 1.0', "swarm_head_version 1.0", "swarm_members_on_head 1.0",
                     "swarm_publish_to_apply_seconds_count 1.0"):  # fmt: skip
            assert line in metrics
        assert get(seed, "readyz")[0] == 200

        swarm.wait("the page has looked again", lambda: look(box)["status"]["pieces"]["version"] == [0, 1])
        pieces = look(box)["status"]["pieces"]
        assert (set(pieces["have"]), set(pieces["giver"])) == ({1.0}, {-1})
        assert get(box, "readyz")[0] == 200
        assert "swarm_lag_versions 0.0" in get(box, "metrics")[1]

        command, environment = swarm.swarm_node("box", "page", "--at", "0")
        page = swarm.popen("page", command, environment=environment, stdout=subprocess.PIPE, text=True)
        shown = next_line(page)
        assert look(shown)["headline"] == "This machine holds version 1, the newest."
        swarm.kill("box")
        swarm.wait("the page says that the relay is away", lambda: "answers" in look(shown)["away"])
        assert look(shown)["status"]["nodes"][0]["held"] == [0, 1]
        assert get(shown, "readyz")[0] == 503
        assert get(shown, "healthz")[0] == 200


def test_a_metrics_port_that_is_taken_is_a_sentence(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        swarm.seed(None, "--raw-mb", "1", "--metrics", "0")
        port = page_of(swarm, "seed").rstrip("/").rpartition(":")[2]
        ended = swarm.command("other", "seed", "--raw-mb", "1", *LOOPBACK, "--metrics", port)
        assert ended.code == 2
        assert f"Cannot serve metrics at 127.0.0.1:{port}" in ended.error_lines
        assert "Choose another port" in ended.error_lines

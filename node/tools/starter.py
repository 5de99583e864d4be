"""The folder that `swarm-node demo --keep` leaves: a model, steps of it, and scripts to try a swarm with."""

import shlex
import sys
from pathlib import Path
from typing import Final

from codec.errors import UsageError
from node.host.child import clone_folder
from node.tools.talking_model import write_model, write_steps

__all__ = ["STEPS", "write_starter"]

STEPS: Final = 3
"""Checkpoints beside the model."""

_ASK: Final = '''\
"""Asks the swarm's gateway: python ask.py "Who are you?"  Any client of OpenAI's API does the same."""

import json
import os
import sys
import time
import urllib.error
import urllib.request

url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1") + "/chat/completions"
question = " ".join(sys.argv[1:]) or "Who are you?"
body = {"model": "policy", "messages": [{"role": "user", "content": question}], "max_tokens": 16, "temperature": 0}
request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
until = time.monotonic() + 300
while True:
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            print(json.load(answer)["choices"][0]["message"]["content"])
            break
    except urllib.error.HTTPError as error:
        if error.code != 503 or time.monotonic() > until:  # 503: no node is ready yet
            sys.exit(error.read().decode())
        time.sleep(1)
    except OSError as error:
        sys.exit(f"{url}: {error}. Does swarm-node gateway run?")
'''

_TWO_BOXES: Final = """\
#!/bin/sh
# Two machines of a swarm, played on this one: a trainer's, with the seed and the gateway, and one that generates.
# It asks the model who it is, publishes the steps, and asks again after each.
set -eu
cd "$(dirname "$0")"
python={python}
{packages}swarm_node() {{ "$python" -P -m node.cli "$@"; }}  # -P: no file of this folder hides a module
unset SWARM_HOME SWARM_TICKET SWARM_CONFIG

trap 'trap - EXIT; kill $box $gateway $seed 2>/dev/null || true; wait' EXIT INT TERM
seed= box= gateway=
"$python" -P -m node.cli seed --base model --home trainer --listen 127.0.0.1:0 --preset loopback 2> trainer.log &
seed=$!
echo "Starting the seed (its log: trainer.log)."
until swarm_node status --home trainer > status.txt 2> status.err; do
    kill -0 $seed 2>/dev/null || {{ tail -n 1 trainer.log >&2; exit 1; }}
    sleep 1
done

swarm_node invite --home trainer > ticket 2> invite.err
"$python" -P -m node.cli join --ticket-file ticket --home box --name box --listen 127.0.0.1:0 2> box.log & box=$!
"$python" -P -m node.cli gateway --home trainer --at 127.0.0.1:0 --max-lag 0 > gateway.url 2> gateway.log & gateway=$!
echo "Starting a node and its engine (its log: box.log)."
until [ -s gateway.url ]; do
    kill -0 $gateway 2>/dev/null || {{ cat gateway.log >&2; exit 1; }}
    sleep 1
done
OPENAI_BASE_URL=$(cat gateway.url)
export OPENAI_BASE_URL

ask() {{
    kill -0 $box 2>/dev/null || {{ tail -n 1 box.log >&2; exit 1; }}
    printf 'The client asks: Who are you?   The model answers: '
    "$python" ask.py "Who are you?"
}}
ask
for step in steps/step_*; do
    swarm_node publish "$step" --home trainer --wait
    ask
done
echo "Done. The homes of both are here: trainer, box."
"""


def write_starter(folder: Path) -> None:
    """Write the model, its steps and the scripts into `folder`. Raises `UsageError` unless it is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty. Choose another folder for --keep.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"Cannot make {folder}: {error.strerror}.") from error
    write_model(folder / "model")
    write_steps(folder / "steps", STEPS)
    (folder / "ask.py").write_text(_ASK)
    script = folder / "two_boxes.sh"
    script.write_text(_TWO_BOXES.format(python=shlex.quote(sys.executable), packages=_packages()))
    script.chmod(0o755)


def _packages() -> str:
    """The lines of the script that say where our packages are: those of a clone need not be installed."""
    clone = clone_folder()
    if clone is None:
        return ""
    return f"PYTHONPATH={shlex.quote(str(clone))}${{PYTHONPATH:+:$PYTHONPATH}}\nexport PYTHONPATH\n"

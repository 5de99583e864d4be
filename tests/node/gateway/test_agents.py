"""Agent frameworks, unmodified and in an environment of their own, call a tool through the gateway."""

import json
from pathlib import Path

import pytest
import trio
from gateway_kit import SpellingEngine, gateway
from test_tools import SIGNS, STOP, TAGS, files

from scenarios.harness.environments import environment

pytestmark = [pytest.mark.conformance, pytest.mark.long]

HOST = Path(__file__).parents[3] / "scenarios" / "conformance" / "agents_host.py"
WITHIN_S = 300.0
"""For all frameworks, of which each imports for some seconds and asks four times."""
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


class Calling(SpellingEngine):
    """Calls the tool `add`, and says its result when that is in the prompt."""

    def next_letter(self, prompt, ids):
        asked = "".join(SIGNS[token] for token in prompt if token < len(SIGNS))
        text = "it is 3" if "result 3" in asked else CALL
        return SIGNS.index(text[len(ids)]) if len(ids) < len(text) else STOP


async def test_frameworks_call_tools_through_the_gateway(tmp_path: Path):
    python = await trio.to_thread.run_sync(lambda: environment("agents", HOST.with_name("agents.txt")))
    async with gateway(tmp_path, files(TAGS)) as (swarm, url):
        await swarm.add(1, engine=Calling(0.001))
        with trio.fail_after(WITHIN_S):
            done = await trio.run_process(
                [python, HOST, url], capture_stdout=True, capture_stderr=True, check=False, cwd=tmp_path
            )
        assert done.returncode == 0, done.stderr.decode()[-3000:]
        found = json.loads(done.stdout)
    assert set(found) == {"openai-agents", "pydantic-ai", "langchain-openai"}
    for name, one in found.items():
        assert one == {"answers": ["it is 3"] * 2, "calls": [[1, 2]] * 2}, name

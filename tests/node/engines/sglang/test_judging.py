"""The driver's side of judgements, against an API server of the test's own; what is refused before SGLang starts."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from api_kit import WITHIN_S, Sglang, generating, line

from codec.errors import UsageError
from node.engines.sglang.front import speak_for
from node.engines.sglang.http import Api
from node.engines.sglang.installed import PLUGIN, Installed, installed
from node.engines.sglang.launch import RunningSglang, StartedSglang
from node.engines.sglang.plugin.swarm_sglang.asked import Asked, Scoring
from node.engines.sglang.plugin.swarm_sglang.calls import ROWS_ALIKE, ROWS_ALIKE_VARIABLE
from node.engines.sglang.server import ServerOptions
from node.engines.top_logprobs import read_top
from node.engines.vllm.links import Listener, PluginFailed, PluginLink
from node.engines.vllm.plugin.swarm_vllm.messages import (
    Front,
    Generated,
    Judge,
    Judged,
    Options,
    Score,
    Scored,
)


def scoring(n: int) -> Score:
    return Score(n, (5, 6), (7, 8), 0.7, 0.9, 0.95, options=Options(top_k=3))


def judging(n: int, **more: Any) -> Judge:
    how = 0.7, 0.9, 0.95, 0.85, (2,), Options(top_k=3), (3, 4), False
    return msgspec.structs.replace(Judge(n, (5, 6), (7, 8), *how), **more)


def read(margins: tuple[float, float] = (1.0, 1.5), **more: Any) -> dict[str, Any]:
    """SGLang's answer to a request that scores. `margins`: in the place of the likeliest tokens."""
    meta = {
        "input_token_logprobs": [[None, 6, None], [-1.0, 7, None], [None, 0, None]],
        "input_top_logprobs": [None, *[[[margin, 0, None]] for margin in margins]],
        "weight_versions": [{"version": "0.3", "start": 0, "end": 1}],
        "finish_reason": {"type": "length"},
    }
    return {"meta_info": meta | more, "output_ids": [4]}


def test_scores_come_back_with_the_version_that_read_them(sglang: Sglang, front: PluginLink):
    sglang.answers["/generate"] = (200, read())
    assert front.get(scoring, Scored, WITHIN_S) == Scored(1, (-1.0, -math.inf), "0.3")
    ((_, body),) = sglang.asked
    assert (body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]) == ([5, 6, 7, 8], 1, 1)
    custom = body["sampling_params"]["custom_params"]
    assert json.loads(custom["swarm"]) == {"top_k": 3}
    asked = msgspec.json.decode(custom["swarm_asked"], type=Asked)
    assert asked == Asked(2, None, Scoring(0.7, 0.9, 0.95))
    assert body["sampling_params"]["temperature"] == 1.0


def test_a_judgement_has_margins_where_the_draw_was_portable(sglang: Sglang, front: PluginLink):
    sglang.answers["/generate"] = (200, read())
    assert front.get(judging, Judged, WITHIN_S) == Judged(1, "0.3", (-1.0, -math.inf), (), (0.0, 0.5))
    asked = msgspec.json.decode(sglang.asked[0][1]["sampling_params"]["custom_params"]["swarm_asked"], type=Asked)
    assert asked == Asked(2, (3, 4), Scoring(0.7, 0.9, 0.95, 0.85), stops=(2,))
    assert front.get(lambda n: judging(n, noise=None), Judged, WITHIN_S).margins == ()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (read((-0.5, 1.0)), "install it again"),
        (read((1.0, 10.0)), "became another version"),
        (read(weight_versions=[{"version": "0.3"}, {"version": "0.4"}]), "became another version"),
        (read(finish_reason={"type": "abort"}), "was stopped"),
        (read(input_token_logprobs=[[-1.0, 3, None], [-1.0, 8, None]]), "other tokens"),
        (read(input_top_logprobs=[]), "not scores"),
        ({}, "not scores"),
        ([], "not scores"),
    ],
)
def test_what_is_no_judgement_is_an_error(sglang: Sglang, front: PluginLink, answer: Any, why: str):
    sglang.answers["/generate"] = (200, answer)
    with pytest.raises(PluginFailed, match=why):
        front.get(judging, Judged, WITHIN_S)


def test_a_replay_puts_the_claimed_tokens_in_the_place_of_drawn_ones(sglang: Sglang, front: PluginLink):
    told = {"output_token_logprobs": [[-2.0, 8, None]], "output_top_logprobs": [[[1.25, 0, None]]]}
    sglang.answers["/generate"] = (200, read(**told) | {"output_ids": [8]})
    asking = {"replay": True, "start": 1, "portable": True}
    assert front.get(lambda n: judging(n, **asking), Judged, WITHIN_S) == Judged(1, "0.3", (-2.0,), (), (0.25,))
    ((_, body),) = sglang.asked
    assert (body["input_ids"], body["sampling_params"]["max_new_tokens"]) == ([5, 6, 7], 1)
    asked = msgspec.json.decode(body["sampling_params"]["custom_params"]["swarm_asked"], type=Asked)
    assert asked == Asked(2, (3, 4), None, (8,), (2,))
    sglang.answers["/generate"] = (200, read(**told) | {"output_ids": [9]})
    with pytest.raises(PluginFailed, match="other tokens"):
        front.get(lambda n: judging(n, **asking), Judged, WITHIN_S)


def test_portable_draws_and_likeliest_tokens_are_asked_for(sglang: Sglang, front: PluginLink):
    last = line(0, [9, 8], "length", [("0.1", 0, 2)])
    last["meta_info"]["output_top_logprobs"] = [[[-0.5, 9, None], [-3e38, 1, None]], [[-0.1, 7, None], [-0.7, 8, None]]]
    other = line(1, [8], "length", [("0.1", 0, 1)])
    other["meta_info"]["output_top_logprobs"] = [[[-0.5, 8, None], [-0.9, 1, None]]]
    sglang.lines = [last, other]
    more = {"options": Options(top_logprobs=2), "seed": 2**64 - 1, "streams": (5, 6)}
    first, _ = front.get(lambda n: msgspec.structs.replace(generating(n), **more), Generated, WITHIN_S).outputs
    assert read_top(first.top, 2) == [
        [(9, -0.5)],
        [(7, pytest.approx(-0.1)), (8, pytest.approx(-0.7))],
    ]
    ((_, body),) = sglang.asked
    assert body["top_logprobs_num"] == 2
    asked = msgspec.json.decode(body["sampling_params"][1]["custom_params"]["swarm_asked"], type=Asked)
    assert asked == Asked(1, (2**64 - 1, 6))


def test_only_an_sglang_that_the_node_started_is_known_to_judge(sglang: Sglang, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"vocab_size": 50, "max_position_embeddings": 300}')
    sglang.info |= {"model_path": str(tmp_path), "context_length": 200}
    for fill, alike in ((True, False), (True, True), (False, False)):
        listener = Listener(tmp_path / f"s{fill}{alike}", lambda why: None)
        speak_for(Api(sglang.url), listener.path, fill=fill, alike=alike)
        hello = listener.next(WITHIN_S).hello
        listener.close()
        assert isinstance(hello, Front)
        assert (hello.judges, hello.portable, hello.tops, hello.replays) == (fill, fill, fill, alike)
        assert (hello.vocabulary, hello.longest, hello.structures) == (50, 200, False)


def test_the_plugins_own_flag_is_kept_from_sglang_and_told_to_its_processes(tmp_path: Path):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "launch_server.py").write_text(
        f"import os, sys; print(sys.argv[1:], os.environ.get({ROWS_ALIKE_VARIABLE!r}))"
    )
    env = {"PYTHONPATH": f"{PLUGIN}:{tmp_path}"}
    for flags, told in (["--port=1", ROWS_ALIKE], "['--port=1'] 1\n"), (["--port=1"], "['--port=1'] None\n"):
        command = [sys.executable, "-m", "swarm_sglang.serve", *flags]
        assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout == told


def test_a_swarm_with_slots_or_a_draft_is_refused_before_anything_starts(tmp_path: Path):
    started = StartedSglang(Installed(Path("/nowhere/python"), "0.5.23", cpu=True), tmp_path / "log", ServerOptions(0))
    for launcher in (started, RunningSglang("http://127.0.0.1:1")):
        with pytest.raises(UsageError, match=r"slots for adapters.*--engine vllm or transformers"):
            launcher.launch(tmp_path, tmp_path / "s", ("--enable-lora",))
    assert not list(tmp_path.iterdir())


def test_an_older_plugin_is_refused_with_what_to_install(tmp_path: Path):
    python = tmp_path / "python"

    def probed(plugin: str) -> None:
        python.write_text(f'#!/bin/sh\necho \'["0.5.23", "{plugin}", "0.5.3", false]\'\n')
        python.chmod(0o755)

    probed("0.2.0")
    with pytest.raises(UsageError, match=r"too old\. Install it again: .* -m pip install"):
        installed(python)
    probed("0.3.0")
    assert installed(python) == Installed(python, "0.5.23", cpu=True)

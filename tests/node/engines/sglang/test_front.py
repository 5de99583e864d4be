"""The driver's side of SGLang, against an API server of the test's own: what is asked, in which order; failures."""

import json
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from api_kit import WITHIN_S, Sglang, generating, line
from tokenizers import Tokenizer, decoders, models

from codec.errors import UsageError
from node.engines.base import EngineError
from node.engines.sglang.front import speak_for
from node.engines.sglang.http import Api
from node.engines.sglang.plugin.swarm_sglang.calls import LOADER, Answer
from node.engines.vllm.links import Listener, PluginFailed, PluginLink
from node.engines.vllm.plugin.swarm_vllm.messages import (
    Changed,
    Check,
    Close,
    Commit,
    Connect,
    Did,
    Front,
    Generated,
    Open,
    Options,
)  # fmt: skip

UPDATE = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]


def test_ranks_are_told_between_two_steps_and_what_runs_waits(sglang: Sglang, front: PluginLink):
    assert front.get(lambda n: Connect(n, "/driver"), Did, WITHIN_S)
    assert sglang.paths == ["/pause_generation", *UPDATE]
    assert sglang.asked[0][1] == {"mode": "in_place"}
    body = sglang.asked[2][1]
    assert (body["load_format"], body["flush_cache"], len(body["serialized_named_tensors"])) == (LOADER, False, 2)
    sglang.asked.clear()
    front.get(lambda n: Open(n, "0.3"), Did, WITHIN_S)
    assert sglang.paths == ["/pause_generation", *UPDATE, "/update_weight_version", "/continue_generation"]
    assert sglang.asked[4][1]["new_version"] == "0.3"


@pytest.mark.parametrize(("policy", "mode"), [("continue", "in_place"), ("recompute", "retract")])
def test_a_commit_names_the_version_before_tokens_are_drawn_from_it(
    sglang: Sglang, front: PluginLink, policy: Any, mode: str
):
    calls: list[str] = []
    sglang.outcome = lambda call, rank: (calls.append(f"{call.do} {call.version}"), Answer(call.number, rank))[1]
    took = front.get(lambda n: Commit(n, "0.4", policy, ()), Changed, WITHIN_S)
    assert took.pause_s > 0
    assert calls == ["commit 0.4"] * 2 + ["name 0.4"] * 2
    assert sglang.asked[0] == ("/pause_generation", {"mode": mode})
    assert sglang.paths[-2:] == ["/update_weight_version", "/continue_generation"]


def test_a_commit_that_wrote_nothing_changes_nothing(sglang: Sglang, front: PluginLink):
    sglang.outcome = lambda call, rank: Answer(call.number, rank, "0.4 is not what is staged")
    with pytest.raises(PluginFailed, match="not what is staged") as failed:
        front.get(lambda n: Commit(n, "0.4", "continue", ()), Changed, WITHIN_S)
    assert not failed.value.touched
    assert sglang.paths[-1] == "/continue_generation"
    assert "/update_weight_version" not in sglang.paths


def test_after_a_commit_of_some_ranks_nothing_is_generated(sglang: Sglang, front: PluginLink):
    sglang.outcome = lambda call, rank: Answer(call.number, rank, "no memory" if rank else "", touched=not rank)
    with pytest.raises(PluginFailed, match="no memory") as failed:
        front.get(lambda n: Commit(n, "0.4", "continue", ()), Changed, WITHIN_S)
    assert failed.value.touched
    assert sglang.paths[-1] == "/abort_request"
    assert "/continue_generation" not in sglang.paths


def test_a_server_that_fails_in_a_commit_may_have_written(sglang: Sglang, front: PluginLink):
    sglang.answers["/update_weights_from_tensor"] = (200, {"success": False, "message": "derived weights"})
    with pytest.raises(PluginFailed, match="derived weights") as failed:
        front.get(lambda n: Commit(n, "0.4", "continue", ()), Changed, WITHIN_S)
    assert failed.value.touched


def test_a_version_that_cannot_be_named_is_not_served(sglang: Sglang, front: PluginLink):
    sglang.answers["/update_weight_version"] = (500, {})
    sglang.answers["/abort_request"] = (500, {})
    with pytest.raises(PluginFailed, match="update_weight_version") as failed:
        front.get(lambda n: Commit(n, "0.4", "continue", ()), Changed, WITHIN_S)
    assert failed.value.touched
    assert "/continue_generation" not in sglang.paths


def test_closing_aborts_what_runs(sglang: Sglang, front: PluginLink):
    front.get(lambda n: Close(n, "wrong bits"), Did, WITHIN_S)
    assert sglang.asked == [
        ("/pause_generation", {"mode": "in_place"}),
        ("/abort_request", {"rid": "", "abort_all": True}),
    ]


def test_completions_come_back_with_the_versions_of_their_tokens(sglang: Sglang, front: PluginLink):
    sglang.lines = [
        line(0, [9], None, [("0.1", 0, 1)]),
        line(1, [8, 2], "stop", [("0.1", 0, 2)]),
        line(0, [9, 9, 9], "length", [("0.1", 0, 1), ("0.2", 1, 3)]),
    ]
    done = front.get(generating, Generated, WITHIN_S).outputs
    assert [output.token_ids for output in done] == [(9, 9, 9), (8, 2)]
    assert [output.finish for output in done] == ["length", "stop"]
    assert done[0].spans == (("0.1", 0, 1), ("0.2", 1, 3))
    ((_, body),) = sglang.asked
    assert body["sampling_params"][1]["sampling_seed"] == 4
    assert body["sampling_params"][0]["stop_token_ids"] == [2]


def test_tokens_are_told_as_they_are_drawn(sglang: Sglang, tmp_path: Path):
    sglang.info |= {"incremental_streaming_output": True}
    sglang.lines = [
        line(0, [9], None, [("0.1", 0, 1)]),
        line(1, [8], None, [("0.1", 0, 1)]),
        line(0, [7, 6], None, [("0.1", 0, 3)]),
        line(1, [2], "stop", [("0.1", 0, 2)]),
        line(0, [5], "length", [("0.1", 0, 3), ("0.2", 3, 4)]),
    ]
    listener = Listener(tmp_path / "s", lambda why: None, "SGLang")
    speak_for(Api(sglang.url), listener.path, fill=True)
    front, told = listener.next(WITHIN_S), []
    asked = front.ask(lambda n: msgspec.structs.replace(generating(n), streamed=True), on_progress=told.append)
    done = asked.result(WITHIN_S)
    listener.close()
    assert isinstance(front.hello, Front)
    assert front.hello.tells
    assert [output.token_ids for output in done.outputs] == [(9, 7, 6, 5), (8, 2)]
    assert done.outputs[0].spans == (("0.1", 0, 3), ("0.2", 3, 4))
    assert [(one.counts, one.drawn) for one in told] == [
        ((1, 0), ((0, 0, (9,), (-0.5,)),)),
        ((1, 1), ((1, 0, (8,), (-0.5,)),)),
        ((3, 1), ((0, 1, (7, 6), (-0.5, -0.5)),)),
    ], "the last tokens come with the completions"
    assert sglang.asked[0][1]["sampling_params"][0]["stream_interval"] == 1


def test_an_sglang_that_repeats_itself_tells_no_tokens(sglang: Sglang, front: PluginLink):
    sglang.lines = [line(i, [9, 8][:n], "length" if n == 2 else None, [("0.1", 0, n)]) for n in (1, 2) for i in (0, 1)]
    assert [one.token_ids for one in front.get(generating, Generated, WITHIN_S).outputs] == [(9, 8)] * 2
    assert isinstance(front.hello, Front)
    assert not front.hello.tells
    assert sglang.asked[0][1]["sampling_params"][0]["stream_interval"] > 1


def test_options_travel_with_each_request_and_a_stop_text_ends_it(sglang: Sglang, tmp_path: Path):
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate("abcdefghij")}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sglang.info |= {"incremental_streaming_output": True, "model_path": str(tmp_path)}
    sglang.lines = [
        line(0, [9, 3], None, [("0.1", 0, 2)]),
        line(1, [8], None, [("0.1", 0, 1)]),
        line(0, [4, 5, 6], None, [("0.1", 0, 4), ("0.2", 4, 5)]),
        line(0, [7], None, []),
        line(1, [3, 4], "length", [("0.1", 0, 3)]),
        line(0, [7], "abort", [("0.1", 0, 3), ("0.2", 3, 7)]),
    ]
    listener = Listener(tmp_path / "s", lambda why: None, "SGLang")
    speak_for(Api(sglang.url), listener.path, fill=True)
    front = listener.next(WITHIN_S)
    options = Options(stop_texts=("ef",), min_tokens=2, top_k=3)
    done = front.get(lambda n: msgspec.structs.replace(generating(n), options=options), Generated, WITHIN_S)
    listener.close()
    assert [output.token_ids for output in done.outputs] == [(9, 3, 4, 5), (8, 3, 4)]
    assert [output.finish for output in done.outputs] == ["stop", "length"]
    assert done.outputs[0].spans == (("0.1", 0, 3), ("0.2", 3, 4))
    assert sglang.asked[1] == ("/abort_request", {"rid": sglang.asked[0][1]["rid"][0]})
    assert len(sglang.asked) == 2
    asked = sglang.asked[0][1]["sampling_params"][1]
    assert json.loads(asked["custom_params"]["swarm"]) == {"stop_texts": ["ef"], "min_tokens": 2, "top_k": 3}
    assert asked["stream_interval"] == 1
    assert "top_k" not in asked


def test_stop_texts_need_the_checkpoints_tokenizer(sglang: Sglang, front: PluginLink):
    with pytest.raises(PluginFailed, match=r"no tokenizer\.json"):
        front.get(
            lambda n: msgspec.structs.replace(generating(n), options=Options(stop_texts=("a",))), Generated, WITHIN_S
        )
    assert not sglang.asked


@pytest.mark.parametrize(
    ("states", "room"),
    [
        ([{"effective_max_running_requests_per_dp": 48}], (48, 9000)),
        ([{"effective_max_running_requests_per_dp": 4096}], (256, 9000)),
        ([], (0, 9000)),
    ],
)
def test_it_says_how_much_it_runs_at_a_time(sglang: Sglang, tmp_path: Path, states: list[Any], room: tuple[int, int]):
    sglang.info |= {"internal_states": states, "max_total_num_tokens": 9000}
    listener = Listener(tmp_path / "s", lambda why: None)
    speak_for(Api(sglang.url), listener.path, fill=False)
    hello = listener.next(WITHIN_S).hello
    listener.close()
    assert isinstance(hello, Front)
    assert (hello.sequences, hello.tokens) == room


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([line(0, [9], "length", [("0.1", 0, 1)])], "not a completion"),
        ([line(5, [9], "length", [("0.1", 0, 1)])], "not given"),
        ([{"error": {"message": "too long"}}], "too long"),
        (["text"], "ended a request"),
        ([line(0, [], "abort", [("0.1", 0, 1)])], "it was aborted"),
        ([{"index": 0}], "not a completion"),
    ],
)
def test_what_is_no_completion_is_an_error(sglang: Sglang, front: PluginLink, lines: list[Any], why: str):
    sglang.lines = lines
    with pytest.raises(PluginFailed, match=why):
        front.get(generating, Generated, WITHIN_S)


def test_what_it_cannot_do_is_a_sentence(front: PluginLink):
    with pytest.raises(PluginFailed, match="SGLang cannot do that: Check"):
        front.get(lambda n: Check(n, ()), Did, WITHIN_S)


@pytest.mark.parametrize("written", [False, True])
def test_an_sglang_that_is_refused_serves_on_unless_its_weights_were_written(
    sglang: Sglang, front: PluginLink, written: bool
):
    sglang.outcome = lambda call, rank: Answer(call.number, rank, "another model" if rank else "", touched=written)
    with pytest.raises(PluginFailed, match="another model"):
        front.get(lambda n: Connect(n, "/driver"), Did, WITHIN_S)
    assert ("/continue_generation" in sglang.paths) == (not written)
    sglang.asked.clear()
    with pytest.raises(PluginFailed, match="Check"):  # a tensor is repacked
        front.get(lambda n: Check(n, ("a",)), Did, WITHIN_S)
    assert sglang.paths == ([] if written else ["/continue_generation"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"custom_weight_loader": []}, "--custom-weight-loader"),
        ({"disable_overlap_schedule": False}, "--disable-overlap-schedule"),
        ({"pp_size": 2}, "parallelism"),
        ({"speculative_algorithm": "EAGLE"}, "drafts"),
        ({"quantization": "fp8"}, "quantizes"),
        ({"enable_lora": True}, "adapters"),
        ({"enable_eplb": True}, "experts"),
    ],
)
def test_an_sglang_that_cannot_follow_says_why(sglang: Sglang, tmp_path: Path, change: dict[str, Any], why: str):
    sglang.info |= change
    listener = Listener(tmp_path / "s", lambda why: None)
    speak_for(Api(sglang.url), listener.path, fill=False)
    hello = listener.next(WITHIN_S).hello
    listener.close()
    assert isinstance(hello, Front)
    assert why in hello.refusal
    assert bool(why) == bool(hello.refusal)


def test_nobody_at_the_url_is_a_sentence(tmp_path: Path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(UsageError, match="Is it running there"):
            speak_for(Api(url), tmp_path / "s", fill=False)
    with pytest.raises(UsageError, match="write it like"):
        Api("localhost:3")


def test_an_answer_that_is_no_json_is_an_error(sglang: Sglang):
    sglang.answers["/x"] = (200, b"<html>")
    with pytest.raises(EngineError, match="not JSON"):
        Api(sglang.url).post("/x", {}, WITHIN_S)
    sglang.answers["/x"] = (400, {"error": "no"})
    with pytest.raises(EngineError, match="refused /x"):
        Api(sglang.url).post("/x", {}, WITHIN_S)

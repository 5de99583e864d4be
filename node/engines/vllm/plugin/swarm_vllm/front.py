"""The API server's side: `--middleware swarm_vllm.front.SwarmFront`.

It attaches to a driver on request (`POST /swarm/attach {"socket": ...}`, from this machine only), generates for the
driver, and passes the driver's calls on to the engine core. Users' own requests pass through. While the engine holds no
proven weights, they are answered with 503.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import asyncio
import contextlib
import json
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from blake3 import blake3
from vllm import __version__
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
from vllm.platforms import current_platform

from . import scores
from .adapter_messages import DropAdapter, SwitchAdapter
from .channel import Channel, Closed, connect
from .gates import Gates
from .images import prompt_of, reads_images
from .judging import Judging, RewindFailed
from .labels import of_request, spans_of
from .messages import (
    Changed,
    Check,
    Close,
    Commit,
    Connect,
    Did,
    Failed,
    Forget,
    FromDriver,
    Front,
    Generate,
    Generated,
    Judge,
    Judged,
    Learned,
    Load,
    Open,
    Output,
    Score,
    Scored,
    Told,
)
from .options import Options
from .requests import MIN_LOGPROB, adapting, drawing, likeliest, prompt_scores
from .routed import split

__all__ = ["SwarmFront"]

_log = logging.getLogger(__name__)
_LOOPBACK = ("127.", "::1", "::ffff:127.")
_OURS = "/swarm/"
_FREE = ("/health", "/metrics", "/version", "/ping", "/load")
"""Paths that are answered even when the engine holds no proven weights."""
_DEV = (
    "/pause", "/resume", "/is_paused", "/abort_requests", "/init_weight_transfer_engine", "/start_weight_update",
    "/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version", "/weight_info",
    "/weight_checker", "/get_world_size", "/collective_rpc", "/reset_prefix_cache", "/reset_mm_cache",
    "/reset_encoder_cache", "/sleep", "/wake_up", "/is_sleeping", "/server_info", "/shutdown_weight_transfer_engine",
    "/release_kv_cache_memory",
)  # fmt: skip
"""vLLM's development routes. They need no password, and can change the weights, so only this machine may use them."""
_ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""vLLM's routes for adapters of its own, which would take the places of the swarm's."""
_MAX_BODY_BYTES = 4096
"""Of `POST /swarm/attach`: one path."""
_REPORT_EVERY_S = 0.5
"""Between two `Told` messages."""

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class SwarmFront:
    """ASGI middleware of one API server."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._closed: str | None = None
        """Why nothing may be generated; None: the weights are proven, or the engine is a user's own."""
        self._channel: Channel | None = None
        self._looked = False
        self._learned: dict[str, str] | None = None
        self._requests = 0
        self._flights: dict[int, list[asyncio.Task[Output]]] = {}
        self._judging = Judging(lambda: bool(self._flights), self._name)
        self._gates = Gates()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        self._close_if_unproven(scope["app"].state.engine_client)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        local = (scope.get("client") or ("",))[0].startswith(_LOOPBACK)
        if path.startswith(_OURS) or path.startswith(_DEV):
            if not local:
                await _answer(send, 403, "this route is for processes on this machine")
                return
            if path == "/swarm/attach" and scope["method"] == "POST":
                await self._attach_route(scope, receive, send)
                return
        elif path in _ADAPTERS and self._channel is not None:
            await _answer(send, 403, "this engine's adapters are the swarm's: publish yours to it")
            return
        elif self._closed is not None and not path.startswith(_FREE) and path != "/":
            await _answer(send, 503, f"the engine holds no proven policy: {self._closed}")
            return
        await self._app(scope, receive, send)

    def _close_if_unproven(self, client: Any) -> None:
        """At the first request: an engine that a node started serves only after its weights were proven."""
        if not self._looked:
            self._looked = True
            if client.vllm_config.load_config.load_format == "swarm":
                self._closed = "it has not been proven yet"

    # ------------------------------------------------------------ attaching

    async def _attach_route(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        more = True
        while more and len(body) <= _MAX_BODY_BYTES:
            event = await receive()
            body += event.get("body", b"")
            more = event.get("more_body", False)
        try:
            socket = json.loads(body[: _MAX_BODY_BYTES + 1])["socket"]
            if not isinstance(socket, str):
                raise TypeError(socket)
        except (ValueError, KeyError, TypeError, RecursionError):
            await _answer(send, 400, 'send {"socket": "/path/of/the/driver"}')
            return
        if self._channel is not None:
            await _answer(send, 409, "another swarm-node is attached to this engine")
            return
        greeted = False
        try:
            self._channel = connect(socket, FromDriver)
            client = scope["app"].state.engine_client
            loop = asyncio.get_running_loop()
            facts = await loop.run_in_executor(None, _facts, client.vllm_config, scope["app"].state, self._learned)
            await loop.run_in_executor(None, self._channel.send, facts)
            greeted = True
        except Closed as error:
            await _answer(send, 502, str(error))
            return
        finally:
            if not greeted and self._channel is not None:  # otherwise no driver could ever attach again
                self._channel.close()
                self._channel = None
        serve = threading.Thread(
            target=self._serve_driver, args=(self._channel, client, loop), name="swarm", daemon=True
        )
        serve.start()
        await _answer(send, 200, "attached")

    def _serve_driver(self, channel: Channel, client: Any, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                message, fds = channel.recv()
                for fd in fds:
                    os.close(fd)
                asyncio.run_coroutine_threadsafe(self._answer_driver(channel, client, message), loop)
        except Closed:
            _log.info("the swarm-node is gone; the engine keeps the version that it has")
        finally:
            channel.close()
            self._channel = None

    async def _answer_driver(self, channel: Channel, client: Any, message: Any) -> None:
        try:
            answer = await self._do(channel, client, message)
        except asyncio.CancelledError:
            answer = Failed(message.number, "it was cancelled")
        except Exception as error:  # the driver decides what to do
            _log.warning("%s failed: %s", type(message).__name__, error)
            answer = Failed(message.number, f"{type(error).__name__}: {error}")
        with contextlib.suppress(Closed):
            await asyncio.get_running_loop().run_in_executor(None, channel.send, answer)

    # ------------------------------------------------------------ the driver's requests

    async def _do(self, channel: Channel, client: Any, message: Any) -> Any:
        core = client.engine_core
        match message:
            case Connect(number, socket):
                await client.init_weight_transfer_engine(WeightTransferInitRequest({"socket": socket}))
                return Did(number)
            case Load(number, names):
                self._closed = self._closed or "it is being filled anew"
                result = await core.call_utility_async("swarm_load", names)
                return self._changed(number, result)
            case Check(number, names):
                result = await core.call_utility_async("swarm_check", list(names))
                return self._changed(number, result)
            case Learned(number, loaded):
                self._learned = loaded
                return Did(number)
            case Commit(number, version, policy, dense):
                result = await core.call_utility_async("swarm_commit", version, policy, list(dense))
                return self._changed(number, result)
            case Open(number, version):
                await core.call_utility_async("swarm_open", version)
                self._closed = None
                return Did(number)
            case Close(number, why):
                self._closed = why
                await core.call_utility_async("swarm_close")
                return Did(number)
            case SwitchAdapter(number, adapter, version, policy, renamed):
                async with self._gates.drained(adapter, policy == "drain"):
                    result = await core.call_utility_async("swarm_switch_adapter", adapter, version, policy, renamed)
                return self._changed(number, result)
            case DropAdapter(number, adapter):
                return self._changed(number, await core.call_utility_async("swarm_drop_adapter", adapter))
            case Forget(number, flight):
                for task in self._flights.get(flight, ()):
                    task.cancel()
                return Did(number)
            case Generate():
                async with self._gates.request(message.adapter):
                    return Generated(message.number, await self._generate(channel, client, message))
            case Score():
                return await self._score(client, message)
            case Judge():
                return await self._judge(client, message)
        raise RuntimeError(f"{type(message).__name__} is not for the front")

    def _changed(self, number: int, result: dict[str, Any]) -> Changed | Failed:
        if result["error"]:
            if result["touched"]:
                self._closed = result["error"]
            return Failed(number, result["error"], result["touched"])
        return Changed(number, result["pause_s"], result["loaded_s"])

    def _refuse_if_closed(self) -> None:
        if self._closed is not None:
            raise RuntimeError(f"the engine holds no proven policy: {self._closed}")

    def _name(self) -> str:
        self._requests += 1
        return f"swarm-{self._requests}"

    async def _score(self, client: Any, message: Score) -> Scored:
        self._refuse_if_closed()
        sampling = scores.scoring(message)
        ids = [*message.prompt, *message.token_ids]
        last = None
        asked = adapting(message.adapter)
        async for output in client.generate({"prompt_token_ids": ids}, sampling, self._name(), lora_request=asked):
            last = output
        assert last is not None
        if last.outputs[0].finish_reason == "abort":
            raise RuntimeError("the engine was stopped")
        (span,) = last.outputs[0].weight_versions
        version = of_request(span.version, message.adapter)
        return Scored(message.number, scores.read(last.prompt_logprobs, message.token_ids), version)

    async def _judge(self, client: Any, message: Judge) -> Judged | Failed:
        self._refuse_if_closed()
        try:
            return await self._judging.judge(client, message)
        except RewindFailed as error:
            self._closed = str(error)
            return Failed(message.number, str(error), touched=True)

    async def _generate(self, channel: Channel, client: Any, message: Generate) -> tuple[Output, ...]:
        self._refuse_if_closed()
        counts = [0] * len(message.prompts)
        told = channel if message.streamed else None
        ones = [self._generate_one(client, message, i, counts, told) for i in range(len(counts))]
        tasks = [asyncio.ensure_future(one) for one in ones]
        self._flights[message.flight] = tasks
        try:
            together = asyncio.gather(*tasks)
            while not (await asyncio.wait([together], timeout=_REPORT_EVERY_S))[0]:
                channel.send(Told(message.number, tuple(counts)))
            return tuple(together.result())
        finally:
            self._flights.pop(message.flight, None)
            for task in tasks:  # one was refused, so the others are not needed
                task.cancel()

    async def _generate_one(
        self, client: Any, message: Generate, i: int, counts: list[int], told: Channel | None
    ) -> Output:
        """The completion of prompt `i`. `counts[i]` follows its length, and `told` gets its tokens as they come."""
        sampling = drawing(message, i)
        ids: list[int] = []
        logprobs: list[float] = []
        options = message.options or Options()
        top, most, scored = bytearray(), options.top_logprobs, options.prompt_logprobs
        delta, of_prompt = None, b""
        prompt, asked = await prompt_of(list(message.prompts[i]), message.images), adapting(message.adapter)
        async for output in client.generate(prompt, sampling, self._name(), lora_request=asked):
            delta = output.outputs[0]
            if scored is not None and output.prompt_logprobs:
                of_prompt = prompt_scores(output.prompt_logprobs, message.prompts[i], scored)
            ids += delta.token_ids
            tops = b"".join(likeliest(by_token, most) for by_token in delta.logprobs or ()) if most else b""
            for by_token, token in zip(delta.logprobs or (), delta.token_ids, strict=True):
                logprobs.append(min(0.0, max(MIN_LOGPROB, by_token[token].logprob)))
            top += tops
            begin, counts[i] = counts[i], len(ids)
            if told is not None and delta.token_ids and delta.finish_reason is None:
                drawn = (i, begin, tuple(ids[begin:]), tuple(logprobs[begin:]))
                told.send(Told(message.number, tuple(counts), (drawn,), (tops,) if most else ()))
        assert delta is not None
        routed = getattr(delta, "routed_experts", None) if message.routes else None
        routes = (b"", 0, 0) if routed is None else split(routed)
        spans = spans_of(delta.weight_versions, message.adapter)
        return Output(
            tuple(ids), tuple(logprobs), delta.finish_reason or "abort", spans, *routes, bytes(top), of_prompt
        )


def _facts(config: Any, state: Any, learned: dict[str, str] | None) -> Front:
    """The first message to the driver: what it must know before it fills this engine."""
    parallel, model = config.parallel_config, config.model_config
    folder = Path(model.model)
    files = {path.name: blake3(path.read_bytes()).digest() for path in _small_files(folder)}
    refusal = _refusal(config, state, folder)
    # With a speculative decoder vLLM makes no `PortableDraws`, and draws tokens in an order that no replay has.
    drafts = config.speculative_config is not None
    return Front(
        os.getpid(), __version__, int(parallel.world_size), files, refusal, learned,
        options=True, judges=not drafts, portable=not drafts, replays=not drafts and current_platform.is_cpu(),
        vocabulary=model.get_vocab_size(), longest=model.max_model_len,
        adapters=0 if config.lora_config is None else config.lora_config.max_loras - 2, experts=_experts(config),
        tells=True, tops=True, structures=not model.skip_tokenizer_init,
        prompts=not config.cache_config.kv_sharing_fast_prefill,
        images=reads_images(config),
        sequences=config.scheduler_config.max_num_seqs, tokens=config.cache_config.kv_cache_size_tokens or 0,
    )  # fmt: skip


def _experts(config: Any) -> int:
    """Experts of each layer, if routes can be told: by vLLM's own option, or on CPUs by `routes`."""
    model, own = config.model_config, getattr(getattr(config, "aux_output_config", None), "enabled", False)
    if not getattr(model, "is_moe", False) or not (own or current_platform.is_cpu()):
        return 0
    return int(model.get_num_experts())


def _small_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [
        path
        for path in folder.iterdir()
        if path.is_file() and not path.name.startswith(".") and path.stat().st_size <= 64 << 20
        if path.suffix not in (".safetensors", ".bin", ".pt", ".gguf")
    ]


def _refusal(config: Any, state: Any, folder: Path) -> str:
    """Why this engine cannot be updated exactly, in a sentence for its user; empty: it can."""
    parallel, model, transfer = config.parallel_config, config.model_config, config.weight_transfer_config
    arguments = getattr(state, "args", None)
    if transfer is None or transfer.backend != "swarm":
        return """Start vLLM with --weight-transfer-config '{"backend": "swarm"}'."""
    if getattr(parallel, "nnodes", 1) > 1 or parallel.distributed_executor_backend == "ray":
        return "Its ranks may be on several machines; weights cross as shared memory, so all must be on this one."
    if parallel.pipeline_parallel_size > 1:
        return "It runs with pipeline parallelism; use tensor parallelism (--tensor-parallel-size) on one machine."
    if parallel.data_parallel_size > 1:
        return "It runs with data parallelism: start one engine a replica and attach to each."
    if getattr(parallel, "enable_eplb", False):
        return "It moves experts while it runs (--enable-eplb), and a map of them would not stay true."
    if lora_refusal := _lora_refusal(config.lora_config, arguments):
        return lora_refusal
    if config.speculative_config is not None and not _drafts_of_swarm(config):
        return (
            "It drafts tokens (--speculative-config) with something that would not be updated: leave it out, and give "
            "the swarm a draft model (seed --draft), which nodes load into vLLMs that they start."
        )
    if model.logprobs_mode != "processed_logprobs":
        return "Start vLLM with --logprobs-mode processed_logprobs: rollouts tell what each token was drawn from."
    if not folder.is_dir():
        return f"Its model {model.model} is not a folder of this machine; give --model a folder."
    if Path(model.tokenizer) != folder:
        return f"Its tokenizer is {model.tokenizer}, not the one in {folder}; leave out --tokenizer."
    if getattr(model, "hf_overrides", None):
        return "It overrides the model's config (--hf-overrides)."
    if arguments is not None and getattr(arguments, "chat_template", None):
        return "It overrides the model's chat template (--chat-template)."
    return ""


def _drafts_of_swarm(config: Any) -> bool:
    """Whether the draft model is the swarm's, which the loader fills from the replica."""
    draft = config.speculative_config.draft_model_config
    extra = config.load_config.model_loader_extra_config
    return draft is not None and config.load_config.load_format == "swarm" and extra.get("draft") == draft.model


def _lora_refusal(lora: Any, arguments: Any) -> str:
    """The same, for the adapters that this engine can serve."""
    if lora is None:
        return ""
    if getattr(arguments, "lora_modules", None) or lora.default_mm_loras:
        return "It serves adapters of its own (--lora-modules): leave them out, and publish them to the swarm."
    if lora.max_loras < 3:
        return "It has too little room for adapters: start it with --max-loras of two more than the swarm's slots."
    if lora.target_modules is None or {"lm_head", "embed_tokens"} & set(lora.target_modules):
        return (
            "It lets adapters change the embedding and the output head: start it with --lora-target-modules and the "
            "names of the linear layers, such as q_proj k_proj v_proj o_proj gate_proj up_proj down_proj."
        )
    return ""


async def _answer(send: Send, status: int, text: str) -> None:
    """Send an answer in the form of OpenAI's errors, so that clients show the sentence."""
    error = {"message": text, "type": "swarm", "code": status}
    body = json.dumps({"detail": text} if status == 200 else {"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"5")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

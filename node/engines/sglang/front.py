"""Speaks for SGLang's API server: it connects to the driver's socket, in the driver's own process, and passes the
driver's messages on as requests to SGLang.

So the driver of a vLLM drives an SGLang too. A call of the ranks (`plugin.swarm_sglang.calls`) goes through SGLang's
own update of weights while generation is paused in place; each rank answers over `_Answers`.
"""

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from blake3 import blake3

from codec.errors import PeerError, UsageError
from node.engines.base import MAX_LENGTH, EngineError
from node.engines.sglang.generating import Drawn, generate
from node.engines.sglang.http import Api
from node.engines.sglang.judging import judge, score
from node.engines.sglang.plugin.swarm_sglang.calls import LOADER, MOST_BYTES, Answer, Call, as_tensors
from node.engines.texts import TokenizerFile
from node.engines.vllm.plugin.swarm_vllm.messages import (
    Changed,
    Check,
    Close,
    Commit,
    Connect,
    Did,
    DropAdapter,
    Failed,
    Forget,
    FromDriver,
    Front,
    Generate,
    Generated,
    Judge,
    Learned,
    Load,
    Open,
    Score,
    Told,
)
from node.ipc.channel import Channel, ChannelClosed, ChannelTimeout, close_fds, connect
from node.ipc.sockets import bind_socket, check_path, check_same_user, remove_socket

__all__ = ["speak_for"]

ASK_WITHIN_S: Final = 60.0
"""For a request that moves no weights."""
CALL_WITHIN_S: Final = 1500.0
"""For a call of the ranks: mapping, or loading all weights."""
ANSWER_WITHIN_S: Final = 30.0
"""For a rank's answer, once SGLang says that its loader returned."""
WAKE_S: Final = 3600.0
REPORT_EVERY_S: Final = 0.5
"""Between two counts of a flight whose tokens are not told."""
MOST_REQUESTS: Final = 256
"""Generated at a time: each has a thread of this process, and a connection."""
SMALL_FILE_BYTES: Final = 64 << 20
WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".gguf")


def speak_for(api: Api, driver: Path, fill: bool, *, alike: bool = False) -> None:
    """Connect to the driver's socket and serve it in threads, until it closes the connection.

    `fill`: this node started the SGLang, so its plugin is as new as the node. It began with no weights; they are loaded
    from the replica. It generates nothing until the driver opens it. `alike`: it was started with `--rows-alike`.
    Raises `UsageError`, with what the user can do, for an SGLang that cannot follow a swarm.
    """
    try:
        info = api.get("/server_info", ASK_WITHIN_S)
    except EngineError as error:
        raise UsageError(f"Nothing that is SGLang answers at {api.url} ({error}). Is it running there?") from error
    front = _Speaker(api, info, fill, driver, alike)
    threading.Thread(target=front.serve, name="sglang", daemon=True).start()


class _Answers:
    """The Unix socket on which ranks answer calls."""

    def __init__(self, path: Path) -> None:
        """Raises `UsageError` for a path that is too long."""
        check_path(path)
        remove_socket(path)
        self.path = path
        self._socket = bind_socket(path, 64)

    def of(self, number: int, ranks: int) -> list[Answer]:
        """The answers of all ranks to a call. Raises `EngineError`."""
        found: dict[int, Answer] = {}
        until = time.monotonic() + ANSWER_WITHIN_S
        while len(found) < ranks:
            self._socket.settimeout(max(0.01, until - time.monotonic()))
            try:
                sock, _ = self._socket.accept()
                with sock:
                    sock.settimeout(ANSWER_WITHIN_S)
                    check_same_user(sock)
                    answer = msgspec.msgpack.decode(_read(sock), type=Answer)
            except (OSError, PeerError, msgspec.MsgspecError) as error:
                raise EngineError(f"{ranks - len(found)} of {ranks} ranks of SGLang did not answer: {error}") from error
            if answer.number == number:
                found[answer.rank] = answer
        return list(found.values())

    def close(self) -> None:
        self._socket.close()
        remove_socket(self.path)


def _read(sock: socket.socket) -> bytes:
    """Everything that the other end sends, up to `MOST_BYTES`."""
    data = b""
    while len(data) <= MOST_BYTES and (some := sock.recv(MOST_BYTES)):
        data += some
    return data


class _Speaker:
    """See the module. One thread receives; each message is carried out in a thread of its own."""

    def __init__(self, api: Api, info: dict[str, Any], fill: bool, driver: Path, alike: bool) -> None:
        self._api, self._fill = api, fill
        self._ranks = int(info.get("tp_size", 1))
        self._answers = _Answers(driver.with_name(driver.name + ".calls"))
        self._numbers = itertools.count(1)
        self._weights = threading.Lock()
        """Held while a call of the ranks runs."""
        self._unwritten = False
        """No driver wrote live weights, as the ranks told when they connected."""
        self._forgotten: set[int] = set()
        self._running: set[int] = set()
        self._version = ""
        self._tells = bool(info.get("incremental_streaming_output"))
        """Each line of a stream has the tokens since the line before; otherwise it has all of them."""
        self._tokenizer = TokenizerFile(Path(str(info.get("model_path", ""))) / "tokenizer.json")
        self._channel: Channel = connect(driver, FromDriver)
        self._channel.send(_facts(info, new=fill, alike=alike))

    # ------------------------------------------------------------ the driver's messages

    def serve(self) -> None:
        """Receive until the driver is gone. SGLang keeps what it has."""
        with contextlib.suppress(ChannelClosed, PeerError):
            while True:
                with contextlib.suppress(ChannelTimeout):
                    message, fds = self._channel.recv(WAKE_S)
                    close_fds(fds)
                    threading.Thread(target=self._answer, args=(message,), name="asked", daemon=True).start()
        self._answers.close()

    def _answer(self, message: Any) -> None:
        try:
            answer = self._do(message)
        except EngineError as error:
            answer = Failed(message.number, str(error))
        with contextlib.suppress(ChannelClosed, ChannelTimeout):
            self._channel.send(answer)

    def _do(self, message: Any) -> Any:
        match message:
            case Connect() | Load() | Commit() | Open() | Close():
                return self._change(message)
            case Generate():
                return Generated(message.number, self._generate(message))
            case Score():
                return score(self._api, message)
            case Judge():
                return judge(self._api, message)
            case Forget(number, flight):
                if flight in self._running:
                    self._forgotten.add(flight)
                return Did(number)
            case Learned(number, _):
                return Did(number)  # every tensor is scattered, so there is nothing to remember
            case DropAdapter(number, _):
                return Changed(number, 0.0, 0.0)  # it has none
            case Check():  # a tensor is not scattered, so the driver leaves
                self._leave()
        raise EngineError(f"SGLang cannot do that: {type(message).__name__}")

    def _change(self, message: Any) -> Any:
        """What changes weights, or whether generation goes on."""
        match message:
            case Connect(number, socket):
                self._pause("in_place")
                answers = self._call("connect", driver=socket, fill=self._fill)
                self._unwritten = not any(answer.touched for answer in answers)
                if any(answer.error for answer in answers):
                    self._leave()
                self._raise_errors(answers)
                return Did(number)
            case Load(number, _):
                self._pause("retract")
                answers = self._call("load")
                self._raise_errors(answers)
                return Changed(number, *[max(answer.seconds for answer in answers)] * 2)
            case Commit(number, version, policy, dense):
                return self._commit(number, version, policy, dense)
            case Open(number, version):
                self._pause("retract")
                self._name(version)
                self._resume()
                return Did(number)
            case _:
                self._stop()
                return Did(message.number)

    def _generate(self, message: Generate) -> tuple[Any, ...]:
        told = time.monotonic()

        def on_line(i: int, begin: int, drawn: Sequence[Drawn]) -> None:
            nonlocal told
            one, rows, tops = drawn[i], (), ()
            if message.streamed and len(one.ids) > begin and not (one.finish or one.stopped):
                rows = ((i, begin, tuple(one.ids[begin:]), tuple(one.logprobs[begin:])),)
                tops = (b"".join(one.tops[begin:]),) if one.most else ()
            if rows or time.monotonic() - told > REPORT_EVERY_S:
                told = time.monotonic()
                with contextlib.suppress(ChannelClosed, ChannelTimeout):
                    self._channel.send(Told(message.number, tuple(len(each.ids) for each in drawn), rows, tops))

        self._running.add(message.flight)
        try:
            return generate(
                self._api,
                message,
                lambda: message.flight in self._forgotten,
                on_line,
                self._tokenizer,
                whole=not self._tells,
            )
        finally:
            self._running.discard(message.flight)
            self._forgotten.discard(message.flight)

    # ------------------------------------------------------------ weights

    def _commit(self, number: int, version: str, policy: str, dense: tuple[str, ...]) -> Changed | Failed:
        """Write what the ranks have staged, between two steps, and give the weights their name."""
        if dense:
            return Failed(number, "SGLang's modules cannot be loaded one by one")
        started = time.perf_counter()
        self._pause("retract" if policy == "recompute" else "in_place")
        try:
            answers = self._call("commit", version=version)
        except EngineError as error:  # some rank may have written
            return self._broken(number, str(error))
        if any(answer.error for answer in answers):
            why = "; ".join(sorted({answer.error for answer in answers if answer.error}))
            if any(answer.touched for answer in answers):
                return self._broken(number, why)
            self._resume()
            return Failed(number, why)
        try:
            self._name(version)
            self._resume()
        except EngineError as error:  # tokens would get the name of the version before
            return self._broken(number, str(error))
        return Changed(number, time.perf_counter() - started, 0.0)

    def _broken(self, number: int, why: str) -> Failed:
        """The answer to a commit that wrote something and did not end. Generation is stopped, if SGLang still lives."""
        with contextlib.suppress(EngineError):
            self._stop()
        return Failed(number, why, touched=True)

    def _name(self, version: str) -> None:
        """Later tokens get this name, and prefixes of other versions are not used."""
        self._raise_errors(self._call("name", version=version))
        if version != self._version:
            body = {"new_version": version, "abort_all_requests": False}
            self._api.post("/update_weight_version", body, ASK_WITHIN_S)
            self._version = version

    def _call(self, do: str, **more: Any) -> list[Answer]:
        """Have every rank do something between two steps. Generation is paused. Raises `EngineError`."""
        with self._weights:
            call = Call(do, next(self._numbers), str(self._answers.path), **more)
            with self._session():
                body = {
                    "serialized_named_tensors": [as_tensors(call)] * self._ranks,
                    "load_format": LOADER,
                    "flush_cache": False,
                }
                self._api.post("/update_weights_from_tensor", body, CALL_WITHIN_S)
                return self._answers.of(call.number, self._ranks)

    @contextmanager
    def _session(self) -> Iterator[None]:
        self._api.post("/begin_weight_update", {}, ASK_WITHIN_S)
        try:
            yield
        finally:
            self._api.post("/end_weight_update", {}, ASK_WITHIN_S)

    def _raise_errors(self, answers: list[Answer]) -> None:
        if errors := sorted({answer.error for answer in answers if answer.error}):
            raise EngineError("; ".join(errors))

    def _pause(self, mode: str) -> None:
        self._api.post("/pause_generation", {"mode": mode}, ASK_WITHIN_S)

    def _resume(self) -> None:
        self._api.post("/continue_generation", {}, ASK_WITHIN_S)

    def _leave(self) -> None:
        """Let an SGLang whose weights no driver wrote serve on as before."""
        if self._unwritten:
            self._resume()

    def _stop(self) -> None:
        """Abort what runs, which could see a mix of versions. Requests that come later wait until the engine opens."""
        self._pause("in_place")
        self._api.post("/abort_request", {"rid": "", "abort_all": True}, ASK_WITHIN_S)


def _facts(info: dict[str, Any], *, new: bool, alike: bool) -> Front:
    """The first message to the driver: what it must know before it fills this engine. `new`: its plugin is this
    release's. `alike`: it may be able to replay."""
    folder = Path(str(info.get("model_path", "")))
    small = [path for path in folder.iterdir() if _is_small(path)] if folder.is_dir() else []
    files = {path.name: blake3(path.read_bytes()).digest() for path in small}
    states = info.get("internal_states") or [{}]
    sequences = min(int(states[0].get("effective_max_running_requests_per_dp") or 0), MOST_REQUESTS)
    config = _config(folder)
    longest = min(int(info.get("context_length") or MAX_LENGTH), int(config.get("max_position_embeddings", MAX_LENGTH)))
    return Front(
        os.getpid(), str(info.get("version", "")), int(info.get("tp_size", 1)), files, _refusal(info), None,
        options=True, tells=bool(info.get("incremental_streaming_output")), sequences=sequences,
        tokens=int(info.get("max_total_num_tokens") or 0), judges=new, replays=alike, portable=new, tops=new,
        structures=new and "tokenizer.json" in files, vocabulary=int(config.get("vocab_size", 0)), longest=longest,
    )  # fmt: skip


def _config(folder: Path) -> dict[str, Any]:
    """Of the model's text part; empty where it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / "config.json").read_text())
        return found | found.get("text_config", {})
    return {}


def _is_small(path: Path) -> bool:
    named = not path.name.startswith(".") and path.suffix not in WEIGHTS
    return named and path.is_file() and path.stat().st_size <= SMALL_FILE_BYTES


def _refusal(info: dict[str, Any]) -> str:
    """Why this SGLang cannot be updated exactly, in a sentence for its user; empty: it can."""
    loaders = info.get("custom_weight_loader") or []
    wanted = [
        (LOADER in loaders, f"Start it with --custom-weight-loader {LOADER}."),
        (bool(info.get("disable_overlap_schedule")), "Start it with --disable-overlap-schedule: otherwise a token may "
         "be given the version after the one that drew it."),
        (info.get("dp_size", 1) == 1 and info.get("pp_size", 1) == 1, "It has data or pipeline parallelism: start an "
         "engine a replica."),
        (not info.get("speculative_algorithm"), "It drafts tokens (--speculative-algorithm), which is not offered."),
        (not info.get("enable_lora"), "It serves adapters of its own (--enable-lora), which is not offered."),
        (not info.get("quantization"), "It quantizes (--quantization), and could not take the swarm's bits in place."),
        (not info.get("enable_eplb"), "It moves experts (--enable-eplb)."),
    ]  # fmt: skip
    return next((why for good, why in wanted if not good), "")

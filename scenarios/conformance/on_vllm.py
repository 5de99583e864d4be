"""One cell of the model matrix on a real vLLM with the product's driver and plugin; it publishes three steps.

After each step every live block is proven, every tensor that vLLM's model computes with equals, bit for bit, that of a
second vLLM engine which loads the same checkpoint itself, and greedy tokens and log-probabilities are equal. Cells
share one vLLM process (`on_vllm_host`), since importing vLLM takes longer than running a tiny model.
"""

import contextlib
import gc
import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from codec import write_checkpoint
from codec.errors import SwarmError, UsageError
from node.engines.base import EngineError, Prompt, SamplingParams
from node.engines.interface import SharedReplica, WeightPatch
from node.engines.vllm.engine import VllmEngine
from node.engines.vllm.links import Listener
from node.engines.vllm.server import environment
from scenarios.conformance.families import tiny
from scenarios.conformance.models import STEPS, Cell, change, load_model, save_base, wrong_bits
from scenarios.conformance.swarm import LocalSwarm
from scenarios.engines.engine_bench import PROBE_ENV

__all__ = ["EXPERTS", "FAMILIES", "ORDER", "STORED", "Host", "HostError", "run_cell"]

STORED: Final = ("bf16", "f16", "f32", "mixed")
"""See `scenarios.conformance.models`. vLLM's `--dtype auto` chooses its own dtype: bfloat16 for f32."""
FAMILIES: Final = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt2", "gemma2", "gemma3_text",
    "phi", "phi3", "mistral", "olmo", "olmo2", "granite", "falcon", "gpt_neox", "mamba", "mamba2", "gpt_oss",
    "qwen2_moe", "gemma", "olmo3", "stablelm", "opt", "bloom", "starcoder2", "cohere2", "glm4", "jamba", "bamba",
    "qwen3_next", "lfm2", "olmoe", "phimoe", "granitemoe", "glm4_moe", "ernie4_5", "smollm3", "nemotron", "exaone4",
    "ministral3", "gptj", "mpt", "cohere", "glm", "apertus", "arcee", "seed_oss", "hunyuan_v1_dense", "minicpm3",
    "internlm3", "persimmon", "codegen", "gpt_bigcode", "granitemoeshared", "ernie4_5_moe", "hunyuan_v1_moe", "dots1",
    "minimax_m2", "afmoe", "flex_olmo", "falcon_mamba", "granitemoehybrid", "zamba2", "falcon_h1", "lfm2_moe",
    "nemotron_h", "qwen3_5_text", "olmo_hybrid",
)  # fmt: skip
"""Families in the order in which they run, commonly trained ones first, so that an interrupted run has those."""
EXPERTS: Final = (
    "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss", "olmoe", "phimoe", "granitemoe",
    "granitemoeshared", "ernie4_5_moe", "glm4_moe", "hunyuan_v1_moe", "dots1", "minimax_m2", "afmoe", "flex_olmo",
    "jamba", "granitemoehybrid", "lfm2_moe", "qwen3_next",
)  # fmt: skip
"""Families with experts, which also run with `experts_in_place`."""
ORDER: Final = (
    ("bf16", False), ("f32", True), ("f16", False), ("mixed", True), ("bf16", True), ("f32", False), ("mixed", False),
    ("f16", True),
)  # fmt: skip
"""(stored, tied) in the order in which they run, so that an interrupted run has the same cells of every family."""
PROMPTS: Final = ((1, 5, 9, 12, 7), (3, 4, 8, 20, 31))
NEW_TOKENS: Final = 6
ANSWER_WITHIN_S: Final = 120.0
MARK: Final = "HOST "
HEAD: Final = "lm_head.weight"

_SMALL: Final[dict[str, Any]] = {
    **dict.fromkeys(
        ("vocab_size", "vocab_size_per_layer_input", "max_position_embeddings", "n_positions", "n_ctx"), 128),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "emb_dim", "lru_width"), 128),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "block_ff_dim"), 256),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "sliding_window"), 64),
    **dict.fromkeys(("head_dim", "attention_head_size", "rotary_dim"), 32),
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 64,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
"""vLLM's kernels for CPUs support few head sizes, and those of DeepSeek's attention only one."""
_OWN: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "falcon": {"ffn_hidden_size": 512},
    "bloom": {"n_inner": 512},
    "mamba2": {"num_heads": 8, "head_dim": 32, "expand": 2, "n_groups": 1},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 32},
}


class HostError(Exception):
    """vLLM cannot load the folder, or its process ended. The text is vLLM's error."""


class Host:
    """vLLM's process, which is restarted after it ended. `release`: vLLM's version."""

    def __init__(self, python: Path, log: Path, *, experts_in_place: bool = False) -> None:
        """`experts_in_place`: compute experts with our own kernel, which leaves their weights as vLLM's loader places
        them, as triton's kernel does on a GPU. vLLM's own kernel for CPUs repacks them."""
        self._python, self._log = python, log
        self._flags = ["--experts-in-place"] if experts_in_place else []
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self.release = ""

    def start(self) -> None:
        """Start the process unless it is running. Raises `HostError`."""
        if self._process is not None and self._process.poll() is None:
            return
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [self._python, Path(__file__).with_name("on_vllm_host.py"), *self._flags], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env=environment(os.environ, 1, True, 1) | PROBE_ENV,
            )  # fmt: skip
        self._lines = queue.Queue()
        threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()
        self.release = self.answer()["vllm"]

    def ask(self, **question: Any) -> dict[str, Any]:
        """Send a question and return the answer. Raises `HostError`."""
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Return the process's next answer. Raises `HostError`."""
        assert self._process is not None
        try:
            line = self._lines.get(timeout=ANSWER_WITHIN_S)
        except queue.Empty:
            self.stop()
            raise HostError(f"vLLM did not answer within {ANSWER_WITHIN_S:.0f} s") from None
        if not line:
            self.stop()
            raise HostError(f"vLLM's process ended with {self._process.returncode}; see {self._log.name}")
        found = json.loads(line.removeprefix(MARK))
        if "error" in found:
            raise HostError(found["error"])
        return found

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _read(stdout: Any, lines: "queue.Queue[str]") -> None:
    """Queue the process's answers, skipping vLLM's other output; an empty line marks the end."""
    for line in stdout:
        if line.startswith(MARK):
            lines.put(line)
    lines.put("")


def run_cell(host: Host, family: str, stored: str, *, tied: bool, folder: Path) -> Cell:
    """Run one cell. `folder`: an empty folder, which is emptied again afterwards."""
    try:
        return _run(host, family, stored, tied, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        gc.collect()


def _run(host: Host, family: str, stored: str, tied: bool, folder: Path) -> Cell:
    def cell(outcome: str, why: object = "", **counts: int) -> Cell:
        return Cell(family, stored, tied, outcome, " ".join(str(why).split())[:400], **counts)

    try:
        config = tiny(family, tied=tied, more=_SMALL, own=_OWN.get(family, {}))
        base = save_base(config, stored, tied, folder / "base")
        trainer = load_model(base, torch.bfloat16 if stored == "mixed" else torch.float32)
    except Exception as error:  # any error of the library goes into the table
        return cell("not built", f"transformers: {type(error).__name__}: {error}")
    if base is None:
        return cell("same", "the family ties them, or does not, whatever its config says")
    try:
        swarm = LocalSwarm(base, trainer)
    except UsageError as error:
        return cell("refused", f"attach: {error}")
    try:
        found = _follow(host, swarm, trainer, folder, cell)
        if found.outcome == "WRONG":  # raises `HostError` if vLLM itself cannot run the model
            _answers(host, base)
        return found
    except HostError as error:
        return cell("not built", f"vLLM: {error}")
    finally:
        swarm.close()


def _follow(host: Host, swarm: LocalSwarm, trainer: Any, folder: Path, cell: Any) -> Cell:
    live: list[dict[str, str]] = []
    found: list[Any] = []
    counts: dict[str, int] = {}
    try:
        with _joined(host, swarm, folder / "joined", live) as engine:
            counts = {"tensors": len(swarm.layout.tensors), "fused": len(engine.classes.loaded)}
            for step in STEPS:
                change(trainer, step)
                swarm.publish(trainer)
                if wrong := wrong_bits(swarm, trainer, folder / step / "saved"):
                    return cell("WRONG", f"{step}: the node's bits of {wrong} are not what save_pretrained writes")
                if (engine.live_hashes() != swarm.node.hashes).any():
                    return cell("WRONG", f"{step}: the live bits are not proven", **counts)
                found.append(_drawn(engine, swarm.version))
                if step != "nothing":
                    write_checkpoint(folder / step / "fresh", swarm.layout, swarm.node.bits, swarm.checkpoint.files)
    except UsageError as error:
        return cell("refused", f"join: {error}")
    except (SwarmError, HostError) as error:
        return cell("WRONG", f"{type(error).__name__}: {error}", **counts)
    if len(live) != len(STEPS) * len(PROMPTS):
        return cell("WRONG", "vLLM's process ended", **counts)
    fresh = {step: _answers(host, folder / step / "fresh") for step in STEPS[:-1]}
    why = ""
    tied = next((tensor for tensor in swarm.layout.tensors if HEAD in tensor.aliases), None)
    if tied is not None and _differing(live[:1], fresh[STEPS[0]]["digests"]) == HEAD:
        why = "a fresh vLLM leaves the head of a tied checkpoint unfilled: it was given the head by name"
        for step in STEPS[:-1]:
            _name_head(folder / step / "fresh", tied.name)
            fresh[step] = _answers(host, folder / step / "fresh")
    fresh["nothing"] = fresh["everything"]
    for i, (step, mine) in enumerate(zip(STEPS, found, strict=True)):
        if wrong := _differing(live[i * len(PROMPTS) : (i + 1) * len(PROMPTS)], fresh[step]["digests"]):
            return cell("WRONG", f"{step}: {wrong} is live otherwise than vLLM loads it from the checkpoint", **counts)
        if mine != fresh[step]["answers"]:
            return cell("WRONG", f"{step}: {mine} drawn, {fresh[step]['answers']} by a fresh engine", **counts)
    return cell("exact", why, **counts)


def _name_head(folder: Path, tied: str) -> None:
    """Store the tensor `tied` in the checkpoint also under the head's name."""
    (shard,) = folder.glob("*.safetensors")
    held = load_file(shard)
    save_file(held | {HEAD: held[tied].clone()}, shard, {"format": "pt"})


def _answers(host: Host, folder: Path) -> dict[str, Any]:
    return host.ask(do="fresh", folder=str(folder), prompts=PROMPTS, tokens=NEW_TOKENS, more={})


def _differing(live: Sequence[dict[str, str]], fresh: dict[str, str]) -> str:
    for each in live:
        for name in sorted(each.keys() | fresh.keys()):
            if each.get(name) != fresh.get(name):
                return name
    return ""


def _drawn(engine: VllmEngine, version: int) -> list[Any]:
    """Return greedy tokens and log-probabilities. Prompts run one at a time, so that batches are equal in both
    engines."""
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
    drawn = []
    for i, prompt in enumerate(PROMPTS):
        ended: queue.Queue[Any] = queue.Queue()
        engine.begin(version * len(PROMPTS) + i, [Prompt(prompt)], sampling, lambda _, found: ended.put(found))  # noqa: B023
        found = ended.get(timeout=ANSWER_WITHIN_S)
        if isinstance(found, EngineError):
            raise found
        drawn.append([list(found[0].token_ids), list(found[0].logprobs)])
    return drawn


@contextlib.contextmanager
def _joined(host: Host, swarm: LocalSwarm, folder: Path, digests: list[dict[str, str]]) -> Iterator[VllmEngine]:
    """Yield the host's engine, which is filled from the node's replica alone and follows it.

    At the end `digests` gets the digests of the live tensors, one entry per generation. Raises `UsageError`,
    `EngineError` or `HostError`.
    """
    folder.mkdir(parents=True)
    for name, data in swarm.checkpoint.files.items():
        (folder / name).write_bytes(data)
    listener = Listener(folder / "vllm.sock", lambda _: None)
    engine = VllmEngine(listener)
    fd = swarm.node.seal_for_readers()
    engine.give_weights(swarm.layout, fd)
    ready = False
    try:
        host.ask(do="live", folder=str(folder), socket=str(listener.path), more={})
        ready = True
        engine.attach_replica(SharedReplica(swarm.node, fd, folder))
        if engine.reload_replica((0, 0), swarm.node.root) != swarm.node.root:
            raise EngineError("the engine was not filled")

        def follow(patch: int, version: int) -> None:
            engine.stage_patch(WeightPatch(patch, (0, version)))
            engine.commit((0, version), swarm.node.root)

        swarm.followers.append(follow)
        yield engine
    finally:
        engine.close()
        if ready:
            with contextlib.suppress(HostError):
                digests += host.answer()["digests"]

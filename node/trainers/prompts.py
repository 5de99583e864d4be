"""Turns a trainer's prompt (token ids, a text, or chat messages) into the token ids that nodes continue."""

import json
import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from codec.errors import UsageError
from node.engines.base import MAX_TOKEN, RewardAsked, SamplingParams
from node.ledger.message_content import NotText, with_plain_content
from node.ledger.messages import MAX_CAPACITY, MAX_TOKENS

__all__ = ["BadPrompt", "Prompt", "PromptSpec", "Tokens", "asked_reward", "check_prompts", "own_terms"]

Prompt = Sequence[int] | str | Sequence[Mapping[str, Any]]
"""Token ids; a text; or a conversation, as messages with `role` and `content`."""


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """A prompt with options of its own, given in the place of a plain prompt.

    `prompt`: token ids, a text, or chat messages. `sampling`: how to sample it; None: as the call of `rollouts` says.
    The call's adapter and routes count for it too. `n`: samples of it, 1 to 4096; None: as the call says. `metadata`:
    anything; it comes back as `RolloutGroup.metadata` or `RefusedPrompt.metadata`, and never leaves this process.

    `reward_metadata`: what the reward function gets with this prompt (`rollouts(reward=...)`), such as the expected
    answer: names and JSON values, at most 16 KiB as JSON. It is sent to the nodes that generate for the prompt.
    """

    prompt: Prompt
    sampling: SamplingParams | None = None
    n: int | None = None
    metadata: Any = None
    reward_metadata: Mapping[str, Any] | None = None


ACCEPTED: Final = "token ids, a text, or chat messages such as [{'role': 'user', 'content': '...'}]"


class BadPrompt(ValueError):
    """One prompt cannot be generated for. The message says why, and what to give instead."""


def check_prompts(prompts: object) -> None:
    """Raises `UsageError` when `prompts` is a single prompt instead of a series of prompts."""
    if isinstance(prompts, str | bytes | Mapping | PromptSpec):
        raise UsageError(f"prompts is one {type(prompts).__name__}: give a list of prompts, each {ACCEPTED}.")
    if isinstance(prompts, list | tuple) and prompts and isinstance(prompts[0], Mapping) and "role" in prompts[0]:
        raise UsageError("prompts is one conversation: give a list of conversations, even of one: [messages].")
    if isinstance(prompts, list | tuple) and prompts and isinstance(prompts[0], int):
        raise UsageError("prompts is one list of token ids: give a list of prompts, even of one: [token_ids].")


def own_terms(spec: PromptSpec, call: SamplingParams) -> tuple[SamplingParams | None, int | None]:
    """The sampling and the number of samples that only this prompt has; None where they are the call's.

    Raises `BadPrompt` for a number out of range, and for sampling that names another adapter than the call.
    """
    if spec.n is not None and not (isinstance(spec.n, int) and 1 <= spec.n <= MAX_CAPACITY):
        raise BadPrompt(f"n={spec.n}: 1 to {MAX_CAPACITY} samples of a prompt can be asked for.")
    if spec.sampling is None:
        return None, spec.n
    if not isinstance(spec.sampling, SamplingParams):
        raise BadPrompt(f"sampling is of type {type(spec.sampling).__name__}: give SamplingParams.")
    adapter, routes = call.extra.adapter, call.extra.routes
    if spec.sampling.extra.adapter not in ("", adapter):
        raise BadPrompt(
            f"Its sampling names the adapter {spec.sampling.extra.adapter!r}: give each adapter a call of its own "
            "(rollouts(adapter=...))."
        )
    wanted = {**({"adapter": adapter} if adapter else {}), **({"routes": True} if routes else {})}
    sampling = spec.sampling.with_options(**wanted)
    return (None if sampling == call else sampling), spec.n


def asked_reward(spec: PromptSpec, name: str) -> RewardAsked | None:
    """The reward `name` (empty: none) of the samples of a prompt. Raises `BadPrompt` for metadata that cannot be
    sent."""
    if not name and spec.reward_metadata is not None:
        raise BadPrompt("It has reward_metadata, and no reward is asked for: give rollouts a reward.")
    if not name:
        return None
    given = spec.reward_metadata or {}
    try:
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise TypeError("it is no mapping of names")
        text = json.dumps(dict(given), ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
        return RewardAsked(name, text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise BadPrompt(f"Its reward_metadata cannot be sent to nodes: {error}. Give names and JSON values.") from error


class Tokens:
    """Reads prompts by the tokenizer and chat template of a base folder, loaded when the first text comes."""

    def __init__(self, base: Path | None) -> None:
        """`base`: the checkpoint folder; None: only token ids can be read."""
        self.base = base
        self._loaded: Any = None

    def of(self, prompt: object) -> tuple[int, ...]:
        """The token ids of one prompt.

        Raises `BadPrompt` when this prompt cannot be read, `UsageError` when no prompt of its kind can.
        """
        if isinstance(prompt, str):
            sequence = self._tokenizer("text")(prompt)["input_ids"]
        elif _is_chat(prompt):
            sequence = self._chat(prompt)
        else:
            sequence = None if isinstance(prompt, bytes | bytearray | Mapping | Set) else prompt
        try:
            ids = tuple(map(operator.index, sequence))  # type: ignore[arg-type]
        except TypeError as error:
            raise BadPrompt(f"The prompt is {_kind(prompt)}: give {ACCEPTED}.") from error
        if not ids:
            raise BadPrompt("The prompt is empty: give at least one token.")
        if len(ids) > MAX_TOKENS:
            raise BadPrompt(f"The prompt has {len(ids):,} tokens; at most {MAX_TOKENS:,} can be sent.")
        if not 0 <= min(ids) <= max(ids) <= MAX_TOKEN:
            raise BadPrompt(f"The prompt has the token id {min(ids) if min(ids) < 0 else max(ids)}: no model has that.")
        return ids

    def _chat(self, messages: Any) -> Any:
        tokenizer = self._tokenizer("chat messages")
        if getattr(tokenizer, "chat_template", None) is None:
            raise UsageError(
                f"{self.base} has no chat template, so chat messages cannot be rendered: give text or token ids."
            )
        try:
            messages = with_plain_content(messages)
        except NotText as error:
            raise BadPrompt(str(error)) from error
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program that comes with a model, and may raise anything
            raise BadPrompt(f"The chat template refuses these messages: {error}") from error
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def _tokenizer(self, what: str) -> Any:
        if self._loaded is None:
            if self.base is None:
                raise UsageError(
                    f"Prompts given as {what} need the base's tokenizer: give Swarm.attach the base folder."
                )
            from transformers import AutoTokenizer

            self._loaded = AutoTokenizer.from_pretrained(self.base, local_files_only=True)
        return self._loaded


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and all(
        isinstance(message, Mapping) and "role" in message for message in prompt
    )  # fmt: skip


def _kind(prompt: object) -> str:
    name = f"of type {type(prompt).__name__}"
    if isinstance(prompt, list | tuple) and prompt:
        return f"{name} and holds a {type(prompt[0]).__name__}"
    return name

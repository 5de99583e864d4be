"""The kinds of `Work` bodies between nodes and the ledger, and of rollouts that the sender signs."""

from collections.abc import Callable
from typing import Any, Final, get_args

import msgspec
import numpy as np

from codec.sign import Key
from node.engines.base import RewardAsked, SamplingOptions, SamplingParams
from node.engines.prompt_scores import pack_scores
from node.ledger import messages as work
from node.ledger.messages import Commits, Reason, Rollout, VersionSpan, WorkMessage
from node.ledger.packing import pack_floats, pack_tokens
from node.ledger.token_messages import DrawnPart
from scenarios.fuzz.inputs.fields import Kind, fields_of, plain
from scenarios.fuzz.inputs.scene import root_of
from scenarios.fuzz.inputs.values import Mutation

__all__ = ["MESSAGES", "SAMPLING", "sample_rollout", "work_kinds"]

MESSAGES: Final[tuple[type[WorkMessage], ...]] = get_args(work._ALL)
SAMPLING: Final = SamplingParams(max_tokens=4, stop_tokens=(2,), seed=9)
SHAPED: Final = SamplingParams(
    max_tokens=4,
    stop_tokens=(2,),
    seed=9,
    options=SamplingOptions(
        min_tokens=1, top_k=5, min_p=0.1, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.5,
        logit_bias=((3, 1.0),), allowed=(2, 8, 9), banned=((8, 8),), stop_texts=("x",), special=True, seeded=True,
        exact=True, portable=True, adapter="a", routes=True, top_logprobs=2, prompt_logprobs=1,
        structure='{"regex":"a"}', reward=RewardAsked("exact_match", b'{"answer":"1"}'), images=(bytes(32),),
    ),
)  # fmt: skip
"""Sampling with every option set, so that each has a place in the sample."""
_GROUP: Final = bytes(16)
_PROMPT: Final = pack_tokens((5, 6, 7))
_ROOT: Final = root_of(0, 3)
_SCORES: Final = pack_scores(np.ones(2, np.uint32), -np.ones(2), np.ones((2, 1), np.uint32), -np.ones((2, 1)))


def sample_rollout() -> Rollout:
    """Return a rollout without a real lease."""
    tokens, logprobs = pack_tokens((8, 9, 2)), pack_floats((-0.5,) * 3)
    claim = work.RewardClaim(0.5, "")
    return Rollout(
        1,
        1,
        0,
        bytes(32),
        tokens,
        logprobs,
        "stop",
        (VersionSpan(0, 3, _ROOT, 3),),
        reward=claim,
        prompt_scores=_SCORES,
    )


SAMPLES: Final[dict[type, WorkMessage]] = {
    work.WorkRequest: work.WorkRequest(1, 8, 0, 3, _ROOT, 100.0, (1,)),
    work.WorkLease: work.WorkLease(1, 1, _GROUP, (0, 1), _PROMPT, SHAPED, 60.0, 0, 3, 1),
    work.Renew: work.Renew(1, 1, 10),
    work.Renewed: work.Renewed(1, 60.0),
    work.SignedRollout: work.SignedRollout(bytes(200)),
    work.RolloutPart: work.RolloutPart(1, 0, 1, 2, bytes(3)),
    work.Follow: work.Follow((1,)),
    work.Drawn: work.Drawn((DrawnPart(1, 1, 0, 0, _PROMPT, pack_floats((-0.5,) * 3), 0, 3, b"\0" * 8),)),
    work.Verdict: work.Verdict(1, 0, Reason.MALFORMED),
    work.GiveBack: work.GiveBack((1,)),
    work.Withdraw: work.Withdraw((1,)),
    work.Unfit: work.Unfit(1, Reason.TOO_OLD),
    work.Cannot: work.Cannot(1, 1, "no"),
    work.Ask: work.Ask(1, _PROMPT, _PROMPT, SHAPED, 0, 3, 0, 3),
    work.WorkAnswer: work.WorkAnswer(1, 0, 3, pack_floats((-0.5,) * 3)),
    work.JudgeRequest: work.JudgeRequest(1, _PROMPT, _PROMPT, SHAPED, 7, 0, 3, 0, 3, False, True),
    work.JudgeAnswer: work.JudgeAnswer(
        1, 0, 3, pack_floats((-0.5,) * 3), pack_floats((-0.4,) * 3), pack_floats((0.0,) * 3)
    ),
    work.AskReward: work.AskReward(1, RewardAsked("exact_match", b'{"answer":"1"}'), _PROMPT, _PROMPT),
    work.RewardAnswer: work.RewardAnswer(1, 0.5, False),
    work.AskImage: work.AskImage(1, bytes(32), 0),
    work.ImagePart: work.ImagePart(bytes(32), 0, 1, bytes(3)),
    work.AskAbilities: work.AskAbilities(),
    work.Abilities: work.Abilities(("options",), "transformers"),
    work.AskAdapters: work.AskAdapters(),
    work.LoadedAdapters: work.LoadedAdapters(("a", "b")),
    work.Timesheet: work.Timesheet(1.0, 1.0, 1.0, 1.0, (Commits(0, 3, 1.0, 1.0, 1.0, 1.0),)),
}

_FLOATS: Final = tuple(
    Mutation(f"log-probabilities {name}", lambda old, rng, v=value: pack_floats((v,) * max(1, len(old) // 4)))
    for name, value in (("nan", float("nan")), ("inf", float("inf")), ("-inf", float("-inf")), ("1", 1.0),
                        ("-1e30", -1e30), ("-0", -0.0))
)  # fmt: skip


_PACKED: Final = (".logprobs", ".scores", ".previous", ".margins")
"""Fields of packed floats."""


def _more(kind: Kind) -> Kind:
    """Add mutations of the numbers inside packed log-probabilities, which are only bytes to the type."""
    fields = tuple(
        msgspec_field_with(field, _FLOATS) if field.name.endswith(_PACKED) else field for field in kind.fields
    )
    return Kind(kind.name, fields, kind.make, kind.enclose, kind.encode, kind.by_authority)


def msgspec_field_with(field: Any, more: tuple[Mutation, ...]) -> Any:
    """Return the field with additional mutations."""
    return type(field)(field.name, field.path, field.mutations + more)


def work_kinds(
    make: Callable[[Any, type], WorkMessage] = lambda world, cls: SAMPLES[cls],
    rollout: Callable[[Any], tuple[Key, Rollout]] = lambda world: (world.me, sample_rollout()),
    carry: Callable[[Any, bytes], bytes] = lambda world, body: body,
) -> list[Kind]:
    """Return a kind for every tag, and one for a rollout inside its message.

    `make(world, cls)` returns a valid message, `rollout(world)` a rollout with the key that signs it, and `carry` turns
    a body into the target's input. Raises `KeyError` when `SAMPLES` lacks a message.
    """
    kinds = [
        Kind(
            f"Work/{cls.__name__}",
            fields_of(cls, plain(SAMPLES[cls])),
            lambda world, cls=cls: plain(make(world, cls)),
            lambda world, body: carry(world, bytes((work.PROTOCOL,)) + body),
        )
        for cls in MESSAGES
    ]

    def signed(world: Any, body: bytes) -> bytes:
        sealed = rollout(world)[0].seal(work.ROLLOUT_DOMAIN, body)
        message = msgspec.msgpack.encode(work.SignedRollout(sealed))
        return carry(world, bytes((work.PROTOCOL,)) + message)

    kinds.append(
        Kind("Work/Rollout", fields_of(Rollout, plain(sample_rollout())), lambda w: plain(rollout(w)[1]), signed)
    )
    return [_more(kind) for kind in kinds]

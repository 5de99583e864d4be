import math

import msgspec
import pytest

from node.engines.base import Completion, Prompt, SamplingParams, Span

GOOD = Completion((5, 6, 7), (-0.5, 0.0, -3.25), "stop", (Span((0, 1), 0, 2), Span((0, 2), 2, 3)))


@pytest.mark.parametrize("value", [GOOD, SamplingParams(3, 0.5, 0.9, 7, (1,)), Prompt((1, 2), 2**64 - 1)])
def test_values_travel_as_messagepack(value):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("logprobs", (-0.5,)),
        ("logprobs", (-0.5, 0.1, -1.0)),
        ("logprobs", (-0.5, math.nan, -1.0)),
        ("logprobs", (-0.5, -math.inf, -1.0)),
        ("token_ids", ()),
        ("spans", ()),
        ("spans", (Span((0, 1), 0, 2),)),
        ("spans", (Span((0, 1), 1, 3),)),
        ("spans", (Span((0, 1), 0, 4),)),
        ("spans", (Span((0, 1), 0, 1), Span((0, 2), 2, 3))),
        ("spans", (Span((0, 1), 0, 2), Span((0, 2), 1, 3))),
        ("spans", (Span((0, 1), 2, 0), Span((0, 2), 0, 3))),
    ],
)
def test_impossible_completions_cannot_be_made(field, wrong):
    with pytest.raises(ValueError, match=r"logprobs|spans"):
        msgspec.structs.replace(GOOD, **{field: wrong})
    raw = msgspec.structs.asdict(GOOD) | {field: wrong}
    with pytest.raises(msgspec.ValidationError, match=r"logprobs|spans|float"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=Completion)

"""Requests for judgements and their answers: bytes that stay, bytes that are refused, and who is asked at all."""

import msgspec
import pytest
from ledger_kit import PROMPT, SAMPLING, group_id

from codec.errors import PeerError
from node.engines.base import SamplingOptions
from node.ledger.assignment.draws import sampling_of
from node.ledger.messages import JudgeAnswer, JudgeRequest, WorkLease, decode, encode
from node.ledger.packing import pack_floats, pack_tokens
from node.ledger.state import Group

REQUEST = JudgeRequest(
    7,
    PROMPT,
    pack_tokens((8, 9, 2)),
    msgspec.structs.replace(SAMPLING, options=SamplingOptions(portable=True)),
    2**64 - 1,
    0,
    3,
    1,
    3,
    True,
)
ANSWER = JudgeAnswer(7, 0, 3, pack_floats([-0.5, -2.0]), pack_floats([-0.25, -2.0]), pack_floats([0.0, 1.5]))

GOLDEN = {
    "request": (
        REQUEST,
        "019c1007c40c050000000600000007000000c40c08000000090000000200000086aa6d61785f746f6b656e7304ab74656d7065726174757265cb3ff0000000000000a5746f705f70cb3ff0000000000000a47365656409ab73746f705f746f6b656e739102a76f7074696f6e7381a8706f727461626c65c3cfffffffffffffffff00030103c3c2",
    ),
    "answer": (ANSWER, "019711070003c408000000bf000000c0c408000080be000000c0c408000000000000c03f"),
    "no answer": (JudgeAnswer(7, 0, 4, b""), "019711070004c400c400c400"),
}


@pytest.mark.parametrize(("message", "wanted"), GOLDEN.values(), ids=GOLDEN)
def test_bytes_that_stay(message, wanted):
    assert encode(message).hex() == wanted
    assert decode(bytes.fromhex(wanted)) == message


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: [*fields[:-1], 5],  # not bytes
        lambda fields: fields[:4],
        lambda fields: [*fields, 1],
        lambda fields: [fields[0], -1, *fields[2:]],
        lambda fields: [*fields[:-1], bytes(4 * (1 << 16) + 4)],  # more tokens than a sample may have
    ],
)
def test_malformed_answers_are_refused(change):
    fields = msgspec.msgpack.decode(encode(ANSWER)[1:])
    with pytest.raises(PeerError):
        decode(b"\x01" + msgspec.msgpack.encode(change(fields)))


def test_a_lease_for_a_node_that_is_not_able_has_the_bytes_of_older_releases():
    group = Group(group_id(0), "s", 0, PROMPT, 1, SAMPLING)
    lease = WorkLease(1, 1, group.id, (0,), PROMPT, sampling_of(group, False), 60.0, 0, 3, 1)
    assert encode(lease) == encode(msgspec.structs.replace(lease, sampling=SAMPLING))
    assert b"portable" not in encode(lease)
    assert b"portable" in encode(msgspec.structs.replace(lease, sampling=sampling_of(group, True)))

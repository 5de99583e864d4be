"""What the driver asks of every rank between two steps, and the rank's answer.

A call travels in SGLang's own update of weights: it is the one tiny tensor that `rank.apply` gets, in every process
that has a part of the model. The weights themselves are in shared memory, whose descriptors come over the driver's
socket. The answer goes over a socket of the driver's that the call names, because SGLang passes no answer of a loader
on.
"""

import base64
import pickle

import msgspec

__all__ = [
    "LOADER",
    "MOST_BYTES",
    "ROWS_ALIKE",
    "ROWS_ALIKE_VARIABLE",
    "TENSOR",
    "Answer",
    "Call",
    "as_tensors",
    "decoded",
]

LOADER = "swarm_sglang.rank.apply"
"""The custom weight loader (`--custom-weight-loader`) of an SGLang that may follow a swarm."""
ROWS_ALIKE = "--rows-alike"
"""The flag of `serve` for rows whose bits depend on no other row, on CPUs (`alike`)."""
ROWS_ALIKE_VARIABLE = "SWARM_SGLANG_ROWS_ALIKE"
"""The variable that tells the flag to the processes that SGLang starts: 1."""
TENSOR = "swarm"
"""The name of the tensor that is a call."""
MOST_BYTES = 1 << 16
"""Of an encoded call or answer: paths, names of versions, a sentence."""


class Call(msgspec.Struct, frozen=True):
    """`do`: what to do. `answer`: path of the socket for the answer. `number`: repeated in it.

    connect: connect to the driver's socket `driver`, and map the weights. They are loaded from the replica if a driver
    wrote them before, or with `fill`, because SGLang began without any.
    commit: write what is staged for `version`. load: load all weights from the replica. name: call prefixes of the
    cache by `version` from now on.
    """

    do: str
    number: int
    answer: str
    driver: str = ""
    fill: bool = False
    version: str = ""


class Answer(msgspec.Struct, frozen=True):
    """`error`: why the call failed, or empty. `touched`: live weights were written, of a connection: by any driver."""

    number: int
    rank: int
    error: str = ""
    touched: bool = False
    seconds: float = 0.0


def as_tensors(call: Call) -> str:
    """The call as one rank's `serialized_named_tensors`: the pickle of [(TENSOR, a uint8 tensor)], in base64.

    Written without torch: the pickle names torch's constructor, which SGLang's reader of pickles allows.
    """
    values = pickle.dumps(list(msgspec.msgpack.encode(call)), 2)[2:-1]
    name = pickle.dumps(TENSOR, 2)[2:-1]
    built = b"ctorch\nByteTensor\n" + values + b"\x85R"  # ByteTensor(values)
    return base64.b64encode(b"\x80\x02]" + name + built + b"\x86a.").decode()  # [(name, built)]


def decoded(data: bytes) -> Call:
    """The call in a tensor's bytes. Raises `msgspec.DecodeError` or `msgspec.ValidationError`."""
    return msgspec.msgpack.decode(data, type=Call)

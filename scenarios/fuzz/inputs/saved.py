"""The kinds of messages between a holder of fragments and who asks it, and of the documents that they carry."""

from typing import Final, get_args

from node.saved import messages as saved
from node.saved import record as records
from node.saved.messages import Message
from node.saved.record import StateRecord
from scenarios.fuzz.inputs.fields import Kind, fields_of, plain
from scenarios.fuzz.inputs.scene import AUTHORITY

__all__ = ["DOCUMENTS", "MESSAGES", "open_saved", "saved_kinds"]

MESSAGES: Final[tuple[type[Message], ...]] = get_args(saved._ALL)
DOCUMENTS: Final = {StateRecord: records._DOMAIN, saved._Pass: saved._PASS_DOMAIN}
_NOW: Final = 1000.0
SAMPLES: Final[dict[type[Message], Message]] = {
    saved.Show: saved.Show(b"pass"),
    saved.AskHeld: saved.AskHeld(),
    saved.Place: saved.Place(b"record", 1, 7),
    saved.Settle: saved.Settle(7),
    saved.Fetch: saved.Fetch(7, 1, 0),
    saved.AskVersion: saved.AskVersion(),
    saved.FetchBlob: saved.FetchBlob(1, bytes(32)),
    saved.FetchBlock: saved.FetchBlock(bytes(32), 3),
    saved.Held: saved.Held(
        (saved.HeldState(b"record", (1,)),), (saved.NodeAddress(bytes(32), ("/ip4/10.0.0.1/tcp/4001",)),)
    ),
    saved.Send: saved.Send(0),
    saved.Done: saved.Done(),
    saved.Refused: saved.Refused("no"),
    saved.Body: saved.Body(4096),
    saved.Version: saved.Version(b"manifest"),
}
_SIGNED: Final = {
    StateRecord: StateRecord(AUTHORITY.public, 7, 3, 1000, bytes(32), 1, 2, 64, bytes(64)),
    saved._Pass: saved._Pass(AUTHORITY.public, bytes(32), _NOW + 60.0),
}


def saved_kinds() -> list[Kind]:
    """Return a kind for every tag, and one for each document. Raises `KeyError` when `SAMPLES` lacks a message."""
    kinds = [
        Kind(
            f"Saved/{cls.__name__}",
            fields_of(cls, plain(SAMPLES[cls])),
            lambda world, cls=cls: plain(SAMPLES[cls]),
            lambda world, body: body,
        )
        for cls in MESSAGES
    ]
    kinds += [
        Kind(
            f"Saved/{cls.__name__}",
            fields_of(cls, plain(_SIGNED[cls])),
            lambda world, cls=cls: plain(_SIGNED[cls]),
            lambda world, body, domain=domain: AUTHORITY.seal(domain, body),
            by_authority=True,
        )
        for cls, domain in DOCUMENTS.items()
    ]
    return kinds


def open_saved(name: str, data: bytes) -> None:
    """Decode what a kind of this module encodes, as its first reader does, and use it."""
    if name == "Saved/StateRecord":
        record = records.open_record(data, AUTHORITY.public)
        assert sum(map(record.bytes_of_segment, range(record.segments))) == record.fragment_bytes
        assert len(record.digest(record.total - 1, record.segments - 1)) == 32
    elif name == "Saved/_Pass":
        saved.open_pass(data, AUTHORITY.public, bytes(32), _NOW)
    else:
        saved.decode(data)

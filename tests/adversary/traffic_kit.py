"""Expensive traffic of a member: endless blocks of bytes for the control, bulk and gossip streams."""

import os
from collections.abc import Callable, Iterator
from functools import cache

from libp2p.pubsub.pb import rpc_pb2
from peer_kit import Member

from codec import ChunkKey, Manifest
from codec.sign import Key
from node.engines.base import SamplingParams
from node.ledger import messages
from swarm.protocol.core.documents import Report, seal
from swarm.protocol.core.wire import (
    NO_STRIPE,
    Attach,
    Blob,
    Credit,
    Detach,
    Frame,
    FrameKind,
    Have,
    HeartbeatNews,
    Hello,
    Join,
    LacksChunk,
    LateChunkWants,
    ManifestNews,
    Message,
    Offer,
    Ping,
    Reports,
    RosterNews,
    Skip,
    WantBlob,
    WantBlock,
    WantChunk,
    WantManifest,
    WantRoster,
    Work,
    pack_frame,
)
from swarm.runtime.framing import frame_message

Blocks = Iterator[bytes]


def packed(*messages: Message) -> bytes:
    """The messages as they stand on a control stream."""
    return b"".join(map(frame_message, messages))


def made_up_reports(member: Member) -> Blocks:
    """Messages of 4,096 reports, each validly signed by another made-up key: 4,096 signatures to check."""
    block = _made_up(member.seed)
    while True:
        yield block


@cache  # ten Sybils share one such message: signing it takes longer than the attack
def _made_up(seed: bytes) -> bytes:
    reports = []
    for i in range(4096):
        key = Key(i.to_bytes(2, "big") + os.urandom(30))
        report = Report(seed, key.public, i % 64, 1, i, bytes(32), 0, 0, 0, 0, "", 0, 0, 0.0, False, 1.0)
        reports.append(seal(report, key))
    return packed(Reports(0, tuple(reports)))


def own_reports(member: Member) -> Blocks:
    """Valid renewals of its own lease, 1,024 a message, the same ones repeated."""
    block = packed(Reports(0, tuple(member.report() for _ in range(1024))))
    while True:
        yield block


def fresh_reports(member: Member) -> Blocks:
    """New renewals of its own lease, one a message, each of which reports another version."""
    while True:
        yield packed(*(Reports(0, (member.report(version=i % 2, saving=bool(i % 3)),)) for i in range(64)))


def attach_lists(member: Member) -> Blocks:
    """`Attach` with a list of 65,536 chunks that it claims to hold, for two stripes in turn."""
    have = tuple(Have(0, 1 + i % 7, i, i, b"\x01") for i in range(65536))
    blocks = [packed(Attach(stripe, 0, 0, 1 << 40, have)) for stripe in range(2)]
    while True:
        yield from blocks


def attach_and_detach(member: Member) -> Blocks:
    block = packed(*(m for s in range(8) for m in (Attach(s, 0, 0, 1 << 40, ()), Detach(s)))) * 64
    while True:
        yield block


def small_wants(member: Member) -> Blocks:
    """Small requests for rosters, chunks and manifests; the answers are not read."""
    one = packed(
        WantRoster(0), WantChunk(0, 1, 0, 0, b""), WantManifest(0, 0), WantManifest(0, 1), LacksChunk(0, 1, 0, 0),
        Skip(0, 0, 1, 0, 0), Credit(0, 1 << 40), WantRoster(1),
    )  # fmt: skip
    while True:
        yield one * 256


def wants_of_the_model(member: Member) -> Blocks:
    """Requests for blocks, hash lists and files of the model; the answers are not read."""
    names = [os.urandom(32) for _ in range(8)]
    i = 0
    while True:
        requests: list[Message] = []
        for _ in range(256):
            i = (i + 1) % (1 << 32)
            requests += [WantBlock(i, i % 24), WantBlob(i, Blob.LAYOUT + i % 3, names[i % 8], 0)]
        yield packed(*requests)


def control_pings(member: Member) -> Blocks:
    block = packed(*(Ping(i) for i in range(4096)))
    while True:
        yield block


def odd_messages(member: Member) -> Blocks:
    """Well-formed messages that are meant for another receiver, or have no use."""
    news = HeartbeatNews(member.heartbeat)
    block = packed(
        news,
        LateChunkWants(0, 1, 0, tuple(range(24))),
        Offer(0, 1, 0, 0),
        Hello(member.sealed_grant, 0, 0, 0, 0),
        member.join,
    )
    while True:
        yield block * 32


def greetings(member: Member) -> Blocks:
    """`Hello` with an old state, repeated: each is answered with the newer documents."""
    block = packed(Hello(member.sealed_grant, 0, 0, 0, 0)) * 64
    while True:
        yield block


def joins(member: Member) -> Blocks:
    """Repeated `Join`s, each with other addresses: each needs a new grant on disk, and a plan."""
    i = 0
    while True:
        i += 1
        addrs = tuple(f"/ip4/127.0.0.1/tcp/{1 + (i + k) % 60000}" for k in range(4))
        yield packed(Join(member.ticket.capability, addrs, f"v{i}", f"r{i}", float(i % 1000), 1.0, bool(i % 2)))


def bad_work(member: Member) -> Blocks:
    """Malformed `Work` bodies of a few bytes."""
    block = packed(*(Work(b"\x01\xc1" + bytes([i])) for i in range(256))) * 8
    while True:
        yield block


def work_requests(member: Member) -> Blocks:
    """Requests for work that name 4,096 leases, and renewals and rollouts of other nodes' leases."""
    root = bytes(32)
    rollout = messages.Rollout(
        1, 1, 0, root, bytes(4000), bytes(4000), "stop", (messages.VersionSpan(0, 0, root, 1000),)
    )
    bodies: list[messages.WorkMessage] = [
        messages.WorkRequest(1 << 40, 4096, 0, 0, root, 1e9, tuple(range(1 << 40, (1 << 40) + 4096))),
        messages.GiveBack(tuple(range(4096))),
        messages.SignedRollout(messages.seal_rollout(member.key, rollout)),
        messages.SignedRollout(bytes(64) + bytes(3000)),
        messages.Timesheet(1e7, 1e7, 1e7, 1e7, (messages.Commits(0, 1, 1.0, 1.0, 1.0, 1.0),) * 16),
        *(messages.Renew(i, i, i) for i in range(64)),
        messages.WorkAnswer(7, 0, 0, bytes(4096)),
        messages.Cannot(1, 1, "x" * 512),
        messages.Ask(1, bytes(4), bytes(4), SamplingParams(max_tokens=1), 0, 0, 0, 1),
    ]
    block = packed(*(Work(messages.encode(body)) for body in bodies))
    while True:
        yield block


def long_work(member: Member) -> Blocks:
    """`Work` messages with 1 MiB of random bytes."""
    block = packed(Work(b"\x01" + os.urandom(1 << 20)[: (1 << 20) - 1]))
    while True:
        yield block


def long_news(member: Member) -> Blocks:
    """Unsigned rosters of 3 MiB: each ends the session."""
    block = packed(RosterNews(os.urandom(3 << 20)))
    while True:
        yield block


def forged_manifest() -> bytes:
    other = Key.generate()
    return Manifest(other.public, 0, 9, 0, bytes(32), bytes(32), bytes(32), (), 0, 0).seal(other)


def manifest_news(member: Member) -> Blocks:
    while True:
        yield packed(ManifestNews(forged_manifest()))


def gossip(member: Member) -> Blocks:
    """GossipSub frames: subscriptions, and manifests that another key signed."""
    topic = f"/swarm-node/{member.seed.hex()[:16]}"
    i = 0
    while True:
        rpc = rpc_pb2.RPC()
        rpc.subscriptions.add(subscribe=True, topicid=topic)
        for _ in range(64):
            i += 1
            rpc.publish.add(
                from_id=member.key.public, seqno=i.to_bytes(8, "big"), data=forged_manifest() + os.urandom(200),
                topicIDs=[topic],
            )  # fmt: skip
        body = rpc.SerializeToString()
        yield varint(len(body)) + body


def varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def unknown_parts(member: Member) -> Blocks:
    """Parts of blobs that the receiver did not request."""
    body = os.urandom(65536)
    heads = [pack_frame(Frame(FrameKind.PART, NO_STRIPE, ChunkKey(0, 1, 0, 0), i, 0, 65536, 65536)) for i in range(64)]
    while True:
        yield b"".join(head + body for head in heads[:8])


def small_parts(member: Member) -> Blocks:
    """Unrequested parts without a body: only frame heads, 46 bytes each."""
    block = pack_frame(Frame(FrameKind.PART, NO_STRIPE, ChunkKey(0, 1, 0, 0), 1, 0, 0, 0)) * 4096
    while True:
        yield block


CONTROL: dict[str, Callable[[Member], Blocks]] = {
    "reports with made-up keys": made_up_reports,
    "own reports repeated": own_reports,
    "own reports, all new": fresh_reports,
    "huge Attach lists": attach_lists,
    "Attach and Detach": attach_and_detach,
    "small wants without reading": small_wants,
    "wants of the model without reading": wants_of_the_model,
    "control pings": control_pings,
    "odd messages": odd_messages,
    "greetings": greetings,
    "joins": joins,
    "bad Work bodies": bad_work,
    "Work of all kinds": work_requests,
    "long Work bodies": long_work,
    "unsigned rosters": long_news,
    "manifests of another key": manifest_news,
}
BULK: dict[str, Callable[[Member], Blocks]] = {
    "unrequested parts": unknown_parts,
    "empty parts": small_parts,
}
"""Traffic on the bulk lane of the seed, by name. `CONTROL`: the same for the control lane."""
GOSSIP = "forged gossip"
REPLAY = "pieces again"
"""The frames of a version that the seed pushed, sent to the node repeatedly on the bulk lane."""

"""A sample in one file, which a third person can check without the swarm: what was asked, the answer, and who signed.

The node's signature covers the tokens, the log-probabilities and, by `work_hash`, the prompt and the sampling. Each
version that drew tokens is there as the seal that the swarm's key signed, so its root is known. Whoever has weights
with these roots can draw the sample again (`node.engines.replay`).
"""

from typing import Annotated, Final

import msgspec

from codec import Layout, Manifest, open_manifest
from codec.errors import PeerError
from codec.unpack import unpack
from node.engines.base import Completion, Prompt, SamplingParams, Span, Version
from node.ledger.messages import GroupId, Packed32, Rollout, open_rollout, stream_of, work_hash
from node.ledger.packing import unpack_floats, unpack_tokens

__all__ = ["MAX_BUNDLE_BYTES", "OpenSample", "SampleBundle"]

MAX_BUNDLE_BYTES: Final = 128 << 20
"""The layout and the seals of a model with a million blocks have some tens of megabytes."""

_KIND: Final = "swarm-node sample 1"
PublicKey = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class SampleBundle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`authority`, `node`: public keys. `rollout`: as the node signed it. `seals`: of each version that drew tokens.
    `layout`: of the model's tensors, encoded."""

    kind: str
    authority: PublicKey
    group: GroupId
    sample: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    prompt: Packed32
    sampling: SamplingParams
    node: PublicKey
    rollout: bytes
    seals: Annotated[tuple[bytes, ...], msgspec.Meta(min_length=1, max_length=64)]
    layout: bytes

    @classmethod
    def of(
        cls,
        authority: bytes,
        group: bytes,
        sample: int,
        prompt: bytes,
        sampling: SamplingParams,
        node: bytes,
        rollout: bytes,
        seals: tuple[bytes, ...],
        layout: bytes,
    ) -> "SampleBundle":
        return cls(_KIND, authority, group, sample, prompt, sampling, node, rollout, seals, layout)

    def encode(self) -> bytes:
        """The bytes of the file; `decode` is the inverse."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "SampleBundle":
        """Raises `PeerError`. Nothing is verified before `open`."""
        if len(data) > MAX_BUNDLE_BYTES:
            raise PeerError(f"sample: {len(data)} bytes, at most {MAX_BUNDLE_BYTES}")
        bundle = unpack(_decoder, data, "sample")
        if bundle.kind != _KIND:
            raise PeerError(f"sample: {bundle.kind!r} is not of a kind that this release reads")
        return bundle

    def open(self) -> "OpenSample":
        """Verify every signature and hash. Raises `PeerError` that names what is wrong."""
        rollout = open_rollout(self.node, self.rollout)
        if rollout.sample != self.sample or rollout.work != work_hash(
            self.group, self.sample, self.prompt, self.sampling
        ):
            raise PeerError("sample: the node signed an answer to another prompt, sampling or sample")
        manifests = {
            (manifest.epoch, manifest.version): manifest
            for manifest in (open_manifest(sealed, self.authority) for sealed in self.seals)
        }
        layout, prompt = Layout.from_bytes(self.layout), unpack_tokens(self.prompt)
        if not prompt or len(rollout.logprobs) != len(rollout.token_ids):
            raise PeerError("sample: a prompt, and a log-probability for each token, are needed")
        for span in rollout.spans:
            manifest = manifests.get((span.epoch, span.version))
            if manifest is None:
                raise PeerError(f"sample: the seal of version {(span.epoch, span.version)} is missing")
            if manifest.root != span.root:
                raise PeerError(f"sample: the node drew from other weights than version {(span.epoch, span.version)}")
            if manifest.layout_hash != layout.hash:
                raise PeerError("sample: its layout is not the one that the seals name")
        return OpenSample(self, rollout, manifests, layout, prompt)


class OpenSample:
    """A verified bundle."""

    def __init__(
        self,
        bundle: SampleBundle,
        rollout: Rollout,
        manifests: dict[Version, Manifest],
        layout: Layout,
        prompt: tuple[int, ...],
    ) -> None:
        self.bundle, self.rollout, self.layout, self.prompt = bundle, rollout, layout, prompt
        self.manifests = manifests
        """By version: the seals of the spans' versions."""

    @property
    def name(self) -> str:
        """GROUP/NUMBER, as the ledger knows it."""
        return f"{self.bundle.group.hex()}/{self.bundle.sample}"

    @property
    def question(self) -> Prompt:
        """The prompt, with the number of the sample's random stream."""
        return Prompt(self.prompt, stream_of(self.bundle.group, self.bundle.sample, self.bundle.sampling))

    @property
    def answer(self) -> Completion:
        """What the node signed. Rounding may make a log-probability exceed 0 by a little; here it does not."""
        rollout, start, spans = self.rollout, 0, []
        for span in rollout.spans:
            spans.append(Span((span.epoch, span.version), start, span.end))
            start = span.end
        logprobs = tuple(min(value, 0.0) for value in unpack_floats(rollout.logprobs))
        return Completion(unpack_tokens(rollout.token_ids), logprobs, rollout.finish_reason, tuple(spans))


_decoder: Final = msgspec.msgpack.Decoder(SampleBundle)

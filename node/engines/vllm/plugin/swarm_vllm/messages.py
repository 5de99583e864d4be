"""The messages between the driver (in the swarm's environment) and the plugin (in vLLM's), over one Unix socket.

    driver                                   front (vLLM's API server)
      <------------------------------------- Front            after `POST /swarm/attach`
      Connect ------------------------------> Did             every rank connects and maps its weights
      Load, Commit, Open, Close ------------> Did, Changed    one call of the engine core, between two steps
      Generate -----------------------------> Told..., Generated    other requests go on meanwhile
      Score --------------------------------> Scored          other requests go on meanwhile
      Judge --------------------------------> Judged          the same, but for a rewind between two steps
      SwitchAdapter, DropAdapter -----------> Changed, Did    one call of the engine core, between two steps

    driver                                   rank (each worker process)
      <------------------------------------- Rank
      Model (replica) ----------------------> Mapped
      Stage (patch), Gather (scratch), ... --> Did, Differs   in a thread; the rank's steps go on
      PrepareAdapter (weights), ProveAdapter > Adapted        the same

No message contains weights: they are passed as descriptors of shared memory. The frame is that of `node.ipc.framing`.
Each request has a number, which its answer repeats. Both ends import this module, so it needs nothing but msgspec.
Messages about adapters are in `adapter_messages`.
"""

import msgspec

from .adapter_messages import Adapted, AdapterLayer, DropAdapter, PrepareAdapter, ProveAdapter, SwitchAdapter
from .options import Options
from .policies import Policy

__all__ = [
    "Adapted",
    "AdapterLayer",
    "Changed",
    "Check",
    "Close",
    "Commit",
    "Compare",
    "Connect",
    "Did",
    "Differs",
    "DropAdapter",
    "Failed",
    "Forget",
    "FromDriver",
    "FromPlugin",
    "Front",
    "Gather",
    "Generate",
    "Generated",
    "Judge",
    "Judged",
    "Learned",
    "Load",
    "Loaded",
    "Loader",
    "Mapped",
    "Model",
    "Open",
    "Options",
    "Output",
    "Part",
    "Policy",
    "PrepareAdapter",
    "ProveAdapter",
    "Rank",
    "Score",
    "Scored",
    "Sources",
    "Stage",
    "SwitchAdapter",
    "Tensor",
    "Told",
    "Unchanged",
]


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A stored tensor of the checkpoint. `names`: its own and its aliases. `offset`: its first byte in the replica."""

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Elements [start, start + count) of a tensor (by its first name), whole rows, at byte `at` of the scratch."""

    name: str
    start: int
    count: int
    at: int


# ---------------------------------------------------------------- from the driver


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Make every rank connect to the driver's socket."""

    number: int
    socket: str


class Model(msgspec.Struct, frozen=True, tag="model"):
    """The checkpoint's tensors. The replica's descriptor comes with the message."""

    number: int
    tensors: tuple[Tensor, ...]
    block_elements: int


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load these tensors (None: all) whole from the replica, through vLLM's own loaders. Stay closed until `Open`."""

    number: int
    names: tuple[str, ...] | None


class Check(msgspec.Struct, frozen=True, tag="check"):
    """Check that loading these tensors again from their first source leaves what the first load left."""

    number: int
    names: tuple[str, ...]


class Learned(msgspec.Struct, frozen=True, tag="learned"):
    """Remember, for the next driver, which tensors must be loaded instead of scattered, and why."""

    number: int
    loaded: dict[str, str]


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """Make the patch ready whose descriptor comes with the message. `scattered`: the tensors to write in place."""

    number: int
    version: str
    scattered: tuple[str, ...]


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Between two steps: write what was staged for `version`, load `dense` from the replica, and take the name."""

    number: int
    version: str
    policy: Policy
    dense: tuple[str, ...]


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Serve: the weights are proven to be `version`."""

    number: int
    version: str


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Abort what runs, and serve nothing until `Open`."""

    number: int
    why: str


class Gather(msgspec.Struct, frozen=True, tag="gather"):
    """Write this rank's live bits of these parts into the scratch whose descriptor comes with the message."""

    number: int
    parts: tuple[Part, ...]


class Compare(msgspec.Struct, frozen=True, tag="compare"):
    """Compare this rank's live bits of these parts with the scratch whose descriptor comes with the message."""

    number: int
    parts: tuple[Part, ...]


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Ask for the hashes of the bits that the last `Load` or `Commit` took from the replica."""

    number: int


class Unchanged(msgspec.Struct, frozen=True, tag="unchanged"):
    """Ask which of these tensors have changed since their loaders wrote them."""

    number: int
    names: tuple[str, ...]


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Generate one completion a prompt.

    `seeds`: one a prompt, for its random numbers. `flight`: the number for `Forget`. `options`: sent only to a front
    whose `Front.options` is true. `streams`: one a prompt, if the draws are portable, with their `seed`; sent only to a
    front whose `Front.portable` is true. `adapter`: the id of the adapter to draw by; 0: none. `routes`: for each
    prompt, the first position whose route of experts is wanted (needs `Front.experts`); empty: none are. `streamed`:
    tell the tokens as they are drawn (needs `Front.tells`). `images`: of each prompt, encoded (needs `Front.images`).
    """

    number: int
    flight: int
    prompts: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    stop_tokens: tuple[int, ...]
    options: Options | None = None
    seed: int = 0
    streams: tuple[int, ...] = ()
    adapter: int = 0
    routes: tuple[int, ...] = ()
    streamed: bool = False
    images: tuple[bytes, ...] = ()


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Drop this flight."""

    number: int
    flight: int


class Score(msgspec.Struct, frozen=True, tag="score"):
    """Score `token_ids` after `prompt`, as drawn with these parameters.

    `widest_top_p`: a token outside the nucleus of `top_p`, but inside this one, is scored as if it were in the former.
    `adapter`: as in `Generate`.
    """

    number: int
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    temperature: float
    top_p: float
    widest_top_p: float
    stop_tokens: tuple[int, ...] = ()
    options: Options | None = None
    adapter: int = 0


class Judge(msgspec.Struct, frozen=True, tag="judge"):
    """Judge `token_ids`, which another node says it drew after `prompt` with these parameters.

    `noise`: seed and stream of portable draws. `previous`: score under the version before, too. Sent only to a front
    whose `Front.judges` is true.

    `replay`: compute the tokens from `start` on as if they were drawn; sent only to a front whose `Front.replays` is
    true. `portable`: tell the margins of a replay, also without `noise`, where the draw is greedy. `adapter`: as in
    `Generate`.
    """

    number: int
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    temperature: float
    top_p: float
    widest_top_p: float
    tightest_top_p: float
    stop_tokens: tuple[int, ...]
    options: Options | None
    noise: tuple[int, int] | None
    previous: bool
    start: int = 0
    replay: bool = False
    portable: bool = False
    adapter: int = 0


# ---------------------------------------------------------------- from the plugin


class Front(msgspec.Struct, frozen=True, tag="front"):
    """The first message of an API server.

    `files`: BLAKE3 of the small files in its model's folder. `refusal`: why it cannot be updated, or empty. `learned`:
    see `Learned`; None before. `options`: it knows the field `options` of `Generate` and `Score`. `judges`: it knows
    `Judge`. `portable`: it can draw portably. `replays`: it knows `Judge.replay`. `vocabulary`: the number of token
    ids. `longest`: tokens that a sequence may have, prompt included. `adapters`: how many it can serve at a time; 0:
    none, or it is older. `experts`: of each layer, if it can tell routes; otherwise 0. `tells`: it knows
    `Generate.streamed`. `tops`: it knows `Options.top_logprobs`. `structures`: it knows `Options.structure`. `prompts`:
    it knows `Options.prompt_logprobs`. `sequences`: that it continues side by side. `tokens`: of all of them together,
    for which it has room; 0: it does not say. `images`: it knows `Generate.images`, and its model reads images.
    """

    pid: int
    vllm: str
    ranks: int
    files: dict[str, bytes]
    refusal: str
    learned: dict[str, str] | None
    options: bool = False
    judges: bool = False
    portable: bool = False
    replays: bool = False
    vocabulary: int = 0
    longest: int = 0
    adapters: int = 0
    experts: int = 0
    tells: bool = False
    tops: bool = False
    structures: bool = False
    prompts: bool = False
    sequences: int = 0
    tokens: int = 0
    images: bool = False


class Rank(msgspec.Struct, frozen=True, tag="rank"):
    """The first message of a worker process.

    `device`, `fingerprint`: see `fingerprint`; measured with vLLM's own threads. `dtype`: in which the model computes.
    `attention`: the kernels of its attention. Empty from an older plugin.
    """

    pid: int
    rank: int
    ranks: int
    device: str = ""
    fingerprint: str = ""
    dtype: str = ""
    attention: str = ""


class Loader(msgspec.Struct, frozen=True, tag="loader"):
    """The first message of a worker process that asks for its first weights (`--load-format swarm`)."""

    pid: int


class Mapped(msgspec.Struct, frozen=True, tag="mapped"):
    """A rank's map. `covered`: elements of each tensor that it has in place. `opaque`: why tensors must be loaded.

    `modules`: the modules whose parameters each tensor feeds. Tensors that share a module are loaded together.
    `device`: the kind of device that the live weights are on, as torch names it.
    """

    number: int
    covered: dict[str, int]
    opaque: dict[str, str]
    modules: dict[str, tuple[str, ...]]
    seconds: float
    device: str = ""


class Did(msgspec.Struct, frozen=True, tag="did"):
    """The request was carried out."""

    number: int
    seconds: float = 0.0


class Changed(msgspec.Struct, frozen=True, tag="changed"):
    """The weights were changed. `pause_s`: time without a step. `loaded_s`: the part of it for loading modules."""

    number: int
    pause_s: float
    loaded_s: float


class Differs(msgspec.Struct, frozen=True, tag="differs"):
    """Answer to `Compare` and `Unchanged`: the tensors that differ."""

    number: int
    names: tuple[str, ...]


class Sources(msgspec.Struct, frozen=True, tag="sources"):
    """By tensor that was loaded: BLAKE3 of its blocks, concatenated."""

    number: int
    hashes: dict[str, bytes]


class Output(msgspec.Struct, frozen=True, array_like=True):
    """One completion. `spans`: (version, start, end) of tokens, in order. `finish`: stop, length, or abort.

    Of a request by an adapter, each version is `BASE/ADAPTER`: those of the base and of the adapter. `routes`: ids of
    experts, a byte each or two, of every position from the one asked for up to the last token but one, in `layers`
    layers, `chosen` each; empty if they were not asked for, or are not known. `top`: of each token, `top_logprobs`
    pairs of u32 and f32, little-endian: the likeliest tokens and their log-probabilities. `scores`: if
    `Options.prompt_logprobs` is not None, of each token of the prompt but the first: such a pair of its rank and its
    log-probability, and so many of the likeliest tokens in its place.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    spans: tuple[tuple[str, int, int], ...]
    routes: bytes = b""
    layers: int = 0
    chosen: int = 0
    top: bytes = b""
    scores: bytes = b""


class Told(msgspec.Struct, frozen=True, tag="told"):
    """The number of tokens that each prompt of a running `Generate` has so far. `drawn`: what a streamed one
    drew since the last `Told`: (index of the prompt, number of the first token, tokens, log-probabilities). `tops`: the
    `Output.top` of each of these; empty if they were not asked for."""

    number: int
    counts: tuple[int, ...]
    drawn: tuple[tuple[int, int, tuple[int, ...], tuple[float, ...]], ...] = ()
    tops: tuple[bytes, ...] = ()


class Generated(msgspec.Struct, frozen=True, tag="generated"):
    """Answer to `Generate`, in the order of the prompts."""

    number: int
    outputs: tuple[Output, ...]


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """Answer to `Score`: one log-probability a token. `version`: of the weights after the last token was read, as in
    `Output`."""

    number: int
    logprobs: tuple[float, ...]
    version: str


class Judged(msgspec.Struct, frozen=True, tag="judged"):
    """Answer to `Judge`. `version`: that of `scores`. `previous`, `margins`: empty where there are none.

    A replay has numbers of the tokens from `start` on, other judgements of all tokens.
    """

    number: int
    version: str
    scores: tuple[float, ...]
    previous: tuple[float, ...]
    margins: tuple[float, ...]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The request failed. `touched`: the live weights may be a mix of versions, and the engine has stopped."""

    number: int
    why: str
    touched: bool = False


FromDriver = (
    Connect
    | Model
    | Load
    | Check
    | Learned
    | Stage
    | Commit
    | Open
    | Close
    | Gather
    | Compare
    | Loaded
    | Unchanged
    | Generate
    | Forget
    | Score
    | Judge
    | PrepareAdapter
    | ProveAdapter
    | SwitchAdapter
    | DropAdapter
)
FromPlugin = (
    Front
    | Rank
    | Loader
    | Mapped
    | Did
    | Changed
    | Differs
    | Sources
    | Told
    | Generated
    | Scored
    | Judged
    | Adapted
    | Failed
)

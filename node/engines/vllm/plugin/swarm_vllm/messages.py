"""What the driver (in the swarm's environment) and the plugin (in vLLM's) say over one Unix socket.

    driver                                   front (vLLM's API server)
      <------------------------------------- Front            after `POST /swarm/attach`
      Connect ------------------------------> Did             every rank connects and maps its weights
      Load, Commit, Open, Close ------------> Did, Changed    one call of the engine core, between two steps
      Generate -----------------------------> Generated       goes on while the others run
      Score --------------------------------> Scored          the same

    driver                                   rank (each worker process)
      <------------------------------------- Rank
      Model (replica) ----------------------> Mapped
      Stage (patch), Gather (scratch), ... --> Did, Differs   in a thread; the rank's steps go on

Weights are never in a message: they cross as descriptors of shared memory. The frame is that of `node.ipc.framing`.
Both ends import this very file; nothing here needs more than msgspec.
"""

from typing import Literal

import msgspec

__all__ = [
    "Changed",
    "Check",
    "Close",
    "Commit",
    "Compare",
    "Connect",
    "Did",
    "Differs",
    "Failed",
    "Forget",
    "FromDriver",
    "FromPlugin",
    "Front",
    "Gather",
    "Generate",
    "Generated",
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
    "Rank",
    "Score",
    "Scored",
    "Sources",
    "Stage",
    "Tensor",
    "Told",
    "Unchanged",
]

Policy = Literal["continue", "recompute", "drain"]
"""What becomes of running requests when the weights change: they go on with the keys and values that they have; these
are computed anew from the first token; or the change waits until they are done (new ones wait meanwhile)."""


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """One stored tensor of the checkpoint. `offset`: its first byte in the replica. `names`: its own, its aliases'."""

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
    """Let every rank connect to the driver's socket."""

    number: int
    socket: str


class Model(msgspec.Struct, frozen=True, tag="model"):
    """The checkpoint's tensors; the replica's descriptor comes along."""

    number: int
    tensors: tuple[Tensor, ...]
    block_elements: int


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Take these tensors whole from the replica, through vLLM's own loaders; None: all. Stay closed until `Open`."""

    number: int
    names: tuple[str, ...] | None


class Check(msgspec.Struct, frozen=True, tag="check"):
    """Load these tensors again from where they were loaded at first: does that make of them what the first load did?"""

    number: int
    names: tuple[str, ...]


class Learned(msgspec.Struct, frozen=True, tag="learned"):
    """Remember, for whoever attaches next, which tensors must be loaded rather than scattered, and why."""

    number: int
    loaded: dict[str, str]


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """Make the patch ready whose descriptor comes along. `scattered`: tensors to write in place; others are loaded."""

    number: int
    version: str
    scattered: tuple[str, ...]


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Scatter what was staged for `version`, load `dense` from the replica, take the name: between two steps."""

    number: int
    version: str
    policy: Policy
    dense: tuple[str, ...]


class Open(msgspec.Struct, frozen=True, tag="open"):
    """The weights are proven to be `version`: serve."""

    number: int
    version: str


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Serve nothing until opened; what runs is aborted."""

    number: int
    why: str


class Gather(msgspec.Struct, frozen=True, tag="gather"):
    """Write the live bits of these parts, as far as this rank has them, into the scratch that comes along."""

    number: int
    parts: tuple[Part, ...]


class Compare(msgspec.Struct, frozen=True, tag="compare"):
    """Hold the live bits of these parts against the scratch that comes along."""

    number: int
    parts: tuple[Part, ...]


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Which bits did the last `Load` or `Commit` take from the replica?"""

    number: int


class Unchanged(msgspec.Struct, frozen=True, tag="unchanged"):
    """Is what the loaders made of these tensors as they left it?"""

    number: int
    names: tuple[str, ...]


class Options(msgspec.Struct, frozen=True, omit_defaults=True):
    """See `node.engines.base.SamplingOptions`, of which these are the fields that an engine draws by."""

    min_tokens: int = 0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    stop_texts: tuple[str, ...] = ()
    special: bool = False


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """One completion a prompt. `seeds`: one a prompt, of its random numbers. `flight`: to call it off by. `options`:
    fields of `node.engines.base.SamplingOptions`; sent only to a front that says that it knows them."""

    number: int
    flight: int
    prompts: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    stop_tokens: tuple[int, ...]
    options: Options | None = None


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Nobody wants the completions of this flight any more."""

    number: int
    flight: int


class Score(msgspec.Struct, frozen=True, tag="score"):
    """How likely are these tokens after this prompt, drawn like that? `widest_top_p`: of tokens that lie outside the
    nucleus of `top_p`, those inside this one are scored as if they were in it."""

    number: int
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    temperature: float
    top_p: float
    widest_top_p: float
    stop_tokens: tuple[int, ...] = ()
    options: Options | None = None


# ---------------------------------------------------------------- from the plugin


class Front(msgspec.Struct, frozen=True, tag="front"):
    """An API server. `files`: BLAKE3 of the small files in its model's folder. `refusal`: why it cannot be updated.
    `learned`: see `Learned`; None before. `options`: it knows the field of `Generate` and `Score`."""

    pid: int
    vllm: str
    ranks: int
    files: dict[str, bytes]
    refusal: str
    learned: dict[str, str] | None
    options: bool = False


class Rank(msgspec.Struct, frozen=True, tag="rank"):
    """A worker process."""

    pid: int
    rank: int
    ranks: int


class Loader(msgspec.Struct, frozen=True, tag="loader"):
    """A worker process that is loading its model for the first time (`--load-format swarm`), and wants the weights."""

    pid: int


class Mapped(msgspec.Struct, frozen=True, tag="mapped"):
    """Elements of each tensor that this rank has in place, and why others must be loaded instead of scattered.

    `modules`: for each tensor the modules whose parameters it feeds: those that share one are loaded together.
    """

    number: int
    covered: dict[str, int]
    opaque: dict[str, str]
    modules: dict[str, tuple[str, ...]]
    seconds: float


class Did(msgspec.Struct, frozen=True, tag="did"):
    """It is done."""

    number: int
    seconds: float = 0.0


class Changed(msgspec.Struct, frozen=True, tag="changed"):
    """The weights were changed. `pause_s`: the engine ran no step for so long. `loaded_s`: of it, loading modules."""

    number: int
    pause_s: float
    loaded_s: float


class Differs(msgspec.Struct, frozen=True, tag="differs"):
    """These tensors are not as asked."""

    number: int
    names: tuple[str, ...]


class Sources(msgspec.Struct, frozen=True, tag="sources"):
    """BLAKE3 of the blocks, one after the other, of each tensor that was taken from the replica."""

    number: int
    hashes: dict[str, bytes]


class Output(msgspec.Struct, frozen=True, array_like=True):
    """`spans`: (version, start, end) of tokens, in order. `finish`: stop, length, or abort."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    spans: tuple[tuple[str, int, int], ...]


class Told(msgspec.Struct, frozen=True, tag="told"):
    """Tokens so far, of each prompt of a `Generate` that runs."""

    number: int
    counts: tuple[int, ...]


class Generated(msgspec.Struct, frozen=True, tag="generated"):
    """In the order of the prompts."""

    number: int
    outputs: tuple[Output, ...]


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """One log-probability a token. `version`: of the weights after the last of them was read."""

    number: int
    logprobs: tuple[float, ...]
    version: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It could not be done. `touched`: the live weights may be a mix; the engine has stopped."""

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
)
FromPlugin = Front | Rank | Loader | Mapped | Did | Changed | Differs | Sources | Told | Generated | Scored | Failed

"""The settings of every command, as frozen values: from `swarm.toml`, `SWARM_*` and flags, in rising precedence.

Each class has the flags of one command; a field's docstring is its help text. Only the command line builds them from
text; other code and tests construct them directly. A constructor raises `UsageError` for an invalid value.
"""

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from platformdirs import user_data_path

from codec.errors import UsageError
from codec.formats.share import FormatShare, Share
from codec.shards import Shard
from node.settings.addresses import address, duration_s, host_and_port, is_loopback, relay_address
from node.settings.choices import CoderName, DemoEngine, EngineHolds, EngineName, LogLevel, ModelName, Preset, Running
from node.settings.client_keys import KEYS_FILE
from node.settings.council import check_council
from node.settings.engine_choice import check_engine
from node.settings.memory_plan import ReplicaPlace
from node.settings.rates import check_mbit
from node.settings.rewards import check_rewards
from node.settings.shares import check_parts, check_share

__all__ = [
    "DemoConfig",
    "GatewayConfig",
    "InviteConfig",
    "JoinConfig",
    "MemberConfig",
    "PeerConfig",
    "Preset",
    "RelayConfig",
    "SeedConfig",
    "default_home",
]

SEED_PORT: Final = 4001
"""libp2p's usual port."""
DEFAULT_MBIT: Final = 100.0
"""Assumed for a link of unknown rate, in Mbit/s. Too low, the link idles; too high, this node's children are late."""
MAX_ADDRESSES: Final = 4
"""As many as a ticket has room for. A machine has one or two that others can dial."""
MAX_NODES_EVER: Final = 10_000
"""The seed keeps 32 bytes for each, and writes all of a ticket's again when another machine joins."""
MAX_RELAYS: Final = 3
"""Each costs a connection, and an address in the ticket."""
DEFAULT_ADAPTER_RANK: Final = 16
"""In the middle of the ranks that peft's examples use for reinforcement learning, 8 to 32."""
KEPT: Final = "swarm-demo"
"""Folder of `demo --keep` without a value, which earlier releases accepted."""


def default_home() -> Path:
    """Where keys, replicas and chunks are kept unless SWARM_HOME or --home says otherwise."""
    return user_data_path("swarm-node")


def _host_name() -> str:
    return socket.gethostname()[:64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """Settings of every process of a swarm."""

    home: Path = field(default_factory=default_home)
    """Folder for the key, the replica and the chunks; one process at a time."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Address to listen on, as host:port, a port, or a multiaddr; repeat for more. Port 0: any free one."""
    announce: tuple[str, ...] = ()
    """Address at which others reach this machine, where it differs from the one listened on (a port mapping, for
    example; those of Vast.ai and RunPod are found without it); repeat for more."""
    via: tuple[str, ...] = ()
    """Relay through which others reach this machine when they cannot dial it: host:port of a machine on which
    swarm-node relay runs; repeat for more."""
    name: str = field(default_factory=_host_name)
    """Name of this machine, for people."""
    region: str = ""
    """Machines with the same region are near one another: they exchange late chunks there first, and each version
    enters a region once where uplinks allow."""
    up_mbit: float | None = None
    """Uplink in Mbit/s: used for planning, and below 1000 as a limit of what is sent. 0: pass nothing on. Without it
    planning assumes 100, and sending is not limited."""
    down_mbit: float | None = None
    """Downlink in Mbit/s: a machine with much less than the others passes nothing on. Without it planning assumes the
    uplink's rate, but at least 100."""
    metrics: str = ""
    """Serve a page, metrics (OpenMetrics) and health (/healthz, /readyz) at HOST:PORT, or at a port of this machine's
    loopback address. On another address, all but the health needs the token that the log shows."""
    log_level: LogLevel | None = None
    """Log lines from this level on; without it SWARM_LOG, or else info. On a terminal, debug also shows what comes
    with every version."""
    log_file: Path | None = None
    """Write the log to this file too, as JSON lines. A file of 20 MB is renamed to FILE.1, and four older ones stay."""

    def __post_init__(self) -> None:
        # The class is frozen; canonical values replace the given ones once, here.
        object.__setattr__(self, "home", self.home.expanduser().absolute())
        object.__setattr__(self, "listen", tuple(address(text) for text in self.listen))
        object.__setattr__(self, "announce", tuple(address(text) for text in self.announce))
        object.__setattr__(self, "via", tuple(dict.fromkeys(relay_address(text) for text in self.via)))
        if len(self.via) > MAX_RELAYS:
            raise UsageError(f"--via: at most {MAX_RELAYS} relays")
        if not self.listen:
            raise UsageError("--listen: at least one address")
        if len(self.listen) > MAX_ADDRESSES or len(self.announce) > MAX_ADDRESSES:
            raise UsageError(f"--listen, --announce: at most {MAX_ADDRESSES} addresses")
        if any(text.endswith("/tcp/0") for text in self.announce):
            raise UsageError("--announce: give the port that other machines dial, not 0")
        if len(self.name) > 64 or len(self.region) > 64:
            raise UsageError("--name, --region: at most 64 characters")
        check_mbit("--up-mbit", self.planned_up_mbit)
        check_mbit("--down-mbit", self.planned_down_mbit)
        if self.metrics:
            host_and_port(self.metrics)
        if self.log_file is not None:
            object.__setattr__(self, "log_file", self.log_file.expanduser().absolute())

    @property
    def monitor_address(self) -> tuple[str, int] | None:
        """Host and port of the page, metrics and health; None: they are not served."""
        return host_and_port(self.metrics) if self.metrics else None

    @property
    def planned_up_mbit(self) -> float:
        """The uplink that planning assumes, in Mbit/s."""
        return DEFAULT_MBIT if self.up_mbit is None else self.up_mbit

    @property
    def planned_down_mbit(self) -> float:
        """The downlink that planning assumes, in Mbit/s. Few links are slower down than up."""
        return max(DEFAULT_MBIT, self.planned_up_mbit) if self.down_mbit is None else self.down_mbit


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedConfig(PeerConfig):
    """The trainer's own process: it holds the key, admits nodes, and sends each version to them."""

    base: Path | None = None
    """Checkpoint folder of version 0: config, tokenizer and safetensors weights."""
    copy_base: bool = False
    """Copy the base checkpoint to the home at the first start. Without it the home only refers to that folder while the
    swarm needs it, so its files should stay as they are for the first eight versions."""
    raw_mb: int = 0
    """Carry files instead of a policy (publish --raw): the largest one, in MB."""
    key: Path | None = None
    """The swarm's key file; without it the one in SWARM_HOME, made at the first start."""
    listen: tuple[str, ...] = (f"/ip4/0.0.0.0/tcp/{SEED_PORT}",)
    """Address to listen on, as host:port, a port, or a multiaddr; repeat for more."""
    preset: Preset = "wan"
    """The kind of network, which sets heartbeats, leases and deadlines."""
    coder: CoderName = "auto"
    """How changes are coded: rice (the smallest), pco (faster to decode, for few cores behind fast links), or auto: the
    one with which the nodes finish sooner, by --up-mbit, the links that the nodes report, and --node-cores."""
    node_cores: int = 4
    """Cores that the slowest node can spend on decoding, for --coder auto."""
    check_share: float = 0.02
    """Share of accepted samples whose log-probabilities a second node computes again; 0: none."""
    check_tolerance: float = 0.1
    """Nats a token, on average, by which honest nodes may differ: 0.1 for different engines and bfloat16. If all nodes
    compute in float32, 0.0001 also finds samples of a too old version (python -m scenarios.bench.check_tolerance)."""
    own_draws: bool = False
    """Let engines draw by random numbers of their own, and not by those that others can compute. No check then tells
    how tokens were drawn."""
    watch: Path | None = None
    """Folder in which a trainer writes checkpoints (at any depth): each is published as soon as it is complete."""
    watch_marker: str = ""
    """File that the trainer writes into a checkpoint's folder when it is complete (STABLE, for example)."""
    watch_quiet: str = "10s"
    """Without a marker, a checkpoint is complete when nothing in its folder has changed for this long."""
    egress_copies: float | None = None
    """Send at most this many copies of each version, and of the model to machines that join without it, even if the
    swarm must wait; 1.1 leaves a reserve for nodes that are lost meanwhile. Without it there is no cap."""
    shards: int = 0
    """Deal the experts of a mixture over this many ranks (2 to 64), so that a node can hold the blocks of some ranks
    only (join --shard). 0: every node holds the whole model."""
    format: tuple[str, ...] = ()
    """Also carry the model in this format, so that a node can hold it instead of bf16 (join --format): int4-group-e8,
    fp8-block-e8, int8-channel-e8 and others (docs/formats.md); repeat for up to 3. Chosen at the first start."""
    adapters: int = 0
    """Slots for LoRA adapters beside the base (1 to 64), chosen at the first start of a home. An empty slot takes no
    memory. 0: none at a first start, and later those that the home has."""
    adapter_rank: int | None = None
    """The highest rank that an adapter may have, for --adapters; without it 16."""
    draft: Path | None = None
    """Checkpoint folder of a draft model, chosen at the first start: a small model of the base's vocabulary, or a head
    (EAGLE, MTP), by which vLLM proposes tokens that the base then accepts or draws anew."""
    council: tuple[str, ...] = ()
    """A machine that may lead the swarm, as ID@HOST:PORT (swarm-node council-id prints the ID); repeat for all three,
    this one among them. The others run swarm-node standby, and one of them takes over when this one fails."""

    def __post_init__(self) -> None:
        PeerConfig.__post_init__(self)  # super() cannot find a slotted dataclass
        if not 0 <= self.check_share <= 1 or not 0 < self.check_tolerance <= 10:
            raise UsageError("--check-share: 0 to 1; --check-tolerance: above 0, at most 10 nats")
        if (self.base is None) == (self.raw_mb == 0):
            raise UsageError("--base FOLDER: the checkpoint that training starts from; or --raw-mb, to carry files")
        if not 0 <= self.raw_mb <= 1_000_000:
            raise UsageError("--raw-mb: 1 to 1000000")
        if self.watch is not None:
            object.__setattr__(self, "watch", self.watch.expanduser().absolute())
            if not self.watch.is_dir():
                raise UsageError(
                    f"--watch: {self.watch} is not a folder. Make it first (mkdir -p), or give the right one."
                )
        if self.egress_copies is not None and not 1 <= self.egress_copies <= 1e6:
            raise UsageError("--egress-copies: 1 or more; with less than one copy no node would get a whole version")
        if not 1 <= self.node_cores <= 1024:
            raise UsageError("--node-cores: 1 to 1024")
        object.__setattr__(self, "format", tuple(self.format))
        check_parts(self)
        object.__setattr__(self, "council", tuple(self.council))
        check_council(self)
        if "/" in self.watch_marker or len(self.watch_marker) > 255:
            raise UsageError("--watch-marker: the name of a file, without a folder")
        duration_s(self.watch_quiet)

    @property
    def watch_quiet_s(self) -> float:
        return duration_s(self.watch_quiet)

    @property
    def planned_adapter_rank(self) -> int:
        """The rank that a slot has room for."""
        return DEFAULT_ADAPTER_RANK if self.adapter_rank is None else self.adapter_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberConfig(PeerConfig):
    """Settings of every process that joins with a ticket."""

    wait_for_seed: str = "60s"
    """How long to look for the seed at the start before giving up: 60s, 30m, 24h."""
    up_gb_day: float | None = None
    """Send at most this many GB a day (UTC), of any kind. When they are used up this machine passes nothing on until
    the next day; it still gets each version. Without it there is no limit."""
    ticket_file: Path | None = None
    """File that holds the ticket, so that it does not appear in a list of processes."""

    def __post_init__(self) -> None:
        PeerConfig.__post_init__(self)  # super() cannot find a slotted dataclass
        duration_s(self.wait_for_seed)
        if self.up_gb_day is not None and not 0 < self.up_gb_day <= 1e9:
            raise UsageError("--up-gb-day: more than 0; to pass nothing on, use --up-mbit 0")

    @property
    def wait_for_seed_s(self) -> float:
        return duration_s(self.wait_for_seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig(MemberConfig):
    """A rollout node: a replica, and an engine that generates from it."""

    engine: EngineName = "transformers"
    """The engine that generates; none: hold the policy and pass it on."""
    model: Path | None = None
    """Folder of the base checkpoint, if this machine has it; what is missing or differs is fetched from peers."""
    copy_model: bool = False
    """Copy the base checkpoint to the home. Without it the home only refers to that folder; if its files change, what
    is missing is fetched from peers."""
    replica: ReplicaPlace = "auto"
    """Where this machine keeps its copy of the model: ram, disk (no more is written, but more is decoded), engine (as
    disk, but read back out of the engine's memory; on CPUs), none (pass chunks on, as a relay does; an engine needs a
    copy), or auto: ram if the container has enough, else disk."""
    device: str = "auto"
    """Where the engine runs: auto, cpu, cuda or cuda:1."""
    threads: int | None = None
    """CPU threads of the engine; without it torch chooses."""
    engines: int = 0
    """How many engines to run. 0: with vLLM and SGLang as many as this machine has GPUs for, each with GPUs of its own;
    otherwise one."""
    tp: int = 0
    """GPUs (or CPU ranks) of each vLLM or SGLang. 0: the fewest of 1, 2, 4 and 8 that have room for the model and its
    longest sequence; on a CPU 1."""
    vllm_python: Path | None = None
    """Python of the environment that has vLLM and the plugin; without it, this one's."""
    vllm_arg: tuple[str, ...] = ()
    """A flag for vLLM, as --vllm-arg=--max-model-len=4096; repeat for more."""
    sglang_python: Path | None = None
    """Python of the environment that has SGLang and the plugin; without it, this one's."""
    sglang_arg: tuple[str, ...] = ()
    """A flag for SGLang, as --sglang-arg=--context-length=4096; repeat for more."""
    engine_port: int = 8000
    """Port of the server's OpenAI endpoint, on this machine only; further engines get the next ports. 0: any free
    ones."""
    engine_url: tuple[str, ...] = ()
    """URL of a vLLM (with --engine sglang, of an SGLang) that you run yourself, with the plugin, to follow the swarm;
    repeat for more."""
    draft_tokens: int = 3
    """Tokens that vLLM lets the swarm's draft model propose at a time, 1 to 16. 0: hold the draft without loading it;
    the engine can then judge and draw portably, as without a draft. SGLang never loads it."""
    running: Running = "continue"
    """What happens to the server's running requests when a version arrives: they continue with the keys and values that
    they have (continue), compute them again from the first token (recompute), or finish first (drain; not with
    SGLang)."""
    finish_within: str = ""
    """On SIGTERM, first finish the work that this machine holds, for at most this long (100s), then leave with exit
    code 0. Without it the machine gives its work back and leaves at once, with exit code 143."""
    raw_out: Path | None = None
    """In a swarm that carries files: where to write each one that arrives. Needs --engine none."""
    shard: str = ""
    """Hold only the blocks that these ranks need, as 3/8 (rank 3 of 8) or 0,1/8; the seed must have been started with
    --shards 8. Needs --engine none, and memory for these blocks."""
    format: tuple[str, ...] = ()
    """Hold the model in this format instead of bf16 (int4-group-e8, for example); the seed must have been started with
    it (seed --format)."""
    engine_holds: EngineHolds = "bf16"
    """With --format int4-group-e8 and --engine vllm: what vLLM computes with: bf16 (what the codes stand for), or
    format (the packed codes of linear layers themselves; on CPUs)."""
    reward: tuple[str, ...] = ()
    """A function of this machine's that trainers may ask for by name: NAME=MODULE:FUNCTION, or NAME=FILE.py:FUNCTION;
    repeat for more. Nothing of it comes from the network."""
    reward_within: str = "10s"
    """How long one reward may take; then its process is killed, and that sample comes without a reward."""
    reward_memory_mb: int = 4096
    """How much memory (address space) a process that computes rewards may have."""
    state_gb: float = 10.0
    """Disk, in GB, for encrypted fragments of the trainer's saved states (save-state). 0: hold none."""

    def __post_init__(self) -> None:
        MemberConfig.__post_init__(self)
        object.__setattr__(self, "format", tuple(self.format))
        if not 0 <= self.state_gb <= 1e6:
            raise UsageError("--state-gb: 0 to 1000000")
        check_share(self)
        object.__setattr__(self, "engine_url", tuple(self.engine_url))
        object.__setattr__(self, "vllm_arg", tuple(self.vllm_arg))
        object.__setattr__(self, "sglang_arg", tuple(self.sglang_arg))
        if self.finish_within:
            duration_s(self.finish_within)
        if self.engine_url and self.engine == "transformers":  # the URL implies the engine
            object.__setattr__(self, "engine", "vllm")
        check_engine(self)
        object.__setattr__(self, "reward", tuple(self.reward))
        check_rewards(self)

    @property
    def held_shard(self) -> Share | None:
        """None: the whole model."""
        if self.format:
            return FormatShare(self.format[0])
        return Shard.parse(self.shard) if self.shard else None

    @property
    def finish_within_s(self) -> float | None:
        """None: SIGTERM ends the node at once."""
        return duration_s(self.finish_within) if self.finish_within else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig(MemberConfig):
    """Passes chunks on, and connects machines that cannot be dialed: no model, no GPU, no torch."""

    listen: tuple[str, ...] = (f"/ip4/0.0.0.0/tcp/{SEED_PORT}",)
    """Address to listen on, as host:port, a port, or a multiaddr; repeat for more."""
    wait_for_seed: str = "24h"
    """How long to look for the seed at the start before giving up: 60s, 30m, 24h. Longer than for a node, because a
    seed that cannot be dialed connects to its relay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InviteConfig:
    """What a new ticket allows."""

    home: Path = field(default_factory=default_home)
    """The seed's SWARM_HOME."""
    key: Path | None = None
    """The swarm's key file, where it is not SWARM_HOME's own."""
    announce: tuple[str, ...] = ()
    """Address at which nodes reach the seed; without it, the last announced ones; repeat for more."""
    expires: str = "24h"
    """How long the ticket can be used to join (nodes that have joined may stay): 30m, 24h, 7d."""
    nodes: int = 10
    """How many machines may be members with the ticket at a time; one that left or was lost no longer counts."""
    nodes_ever: int = 0
    """How many different machines may ever join with the ticket. 0: no limit."""
    quota_gb: float = 0.0
    """How many GB the ticket's machines may fetch in all while catching up; a machine that fetches beyond it is
    removed. 0: no limit."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", self.home.expanduser().absolute())
        object.__setattr__(self, "announce", tuple(address(text) for text in self.announce))
        duration_s(self.expires)
        if len(self.announce) > MAX_ADDRESSES:
            raise UsageError(f"--announce: at most {MAX_ADDRESSES} addresses")
        if not 1 <= self.nodes <= 1_000_000:
            raise UsageError("--nodes: 1 to 1000000")
        if not 0 <= self.nodes_ever <= MAX_NODES_EVER:
            raise UsageError(f"--nodes-ever: 0 to {MAX_NODES_EVER}; 0 for no limit")
        if not 0 <= self.quota_gb <= 1e9:
            raise UsageError("--quota-gb: 0 or more")

    @property
    def expires_s(self) -> float:
        return duration_s(self.expires)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """An OpenAI-compatible endpoint in front of the swarm."""

    home: Path = field(default_factory=default_home)
    """The seed's SWARM_HOME."""
    at: str = "127.0.0.1:8000"
    """Address to listen on, as host:port. Port 0: any free one. Other machines can connect only with a key."""
    model_name: str = "policy"
    """What clients call the model."""
    api_key: str = ""
    """The API key that clients must send; without it, none. SWARM_API_KEY and --api-key-file hide it from other users
    of this machine."""
    api_key_file: Path | None = None
    """File that holds that key; it has precedence over SWARM_API_KEY."""
    max_lag: int = 1
    """How many versions older than the newest a token in an answer may be; 0: none."""
    in_flight: int = 1024
    """Sequences in flight at a time; further requests get status 429."""
    inexact_seeds: bool = False
    """Accept requests with a seed even when no engine can draw the same tokens again beside other requests. The seed
    then fixes the random numbers, but rounding may pick another token now and then. Samples are drawn in one batch,
    which is faster."""
    images: int = 8
    """Images that one request may have, 16 at most; 0: none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", self.home.expanduser().absolute())
        assert address(self.at).split("/")[4].isdecimal()
        if not 1 <= self.in_flight <= 65536:
            raise UsageError("--in-flight: 1 to 65536")
        if not 0 <= self.max_lag <= 1024:
            raise UsageError("--max-lag: 0 to 1024")
        if not 0 <= self.images <= 16:
            raise UsageError("--images: 0 to 16")
        if not 1 <= len(self.model_name) <= 256:
            raise UsageError("--model-name: 1 to 256 characters")
        has_key = self.api_key or self.api_key_file is not None or (self.home / KEYS_FILE).exists()
        if not has_key and not is_loopback(self.host):
            raise UsageError(
                f"Everyone who reaches {self.host} could use the swarm: make a key (swarm-node gateway key add NAME), "
                "give one (SWARM_API_KEY, or --api-key-file), or listen on 127.0.0.1 only."
            )

    @property
    def host(self) -> str:
        """The host of `at`."""
        return address(self.at).split("/")[2]

    @property
    def port(self) -> int:
        """The port of `at`."""
        return int(address(self.at).split("/")[4])

    def url_at(self, port: int) -> str:
        """What clients use, when it listens at `port` of the host."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{port}/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """A whole swarm on this machine."""

    nodes: int = 4
    """Rollout nodes at the start; one is killed during step 3 and a new one joins during step 4."""
    steps: int = 5
    """Training steps."""
    model: ModelName = "tiny"
    """Policy to train."""
    seed: int = 0
    """Seed of all random numbers in training and sampling."""
    keep: Path | None = None
    """Keep everything in this new folder: the folders and logs of all processes (run), and something to begin with: a
    tiny model that says which version it is (model), checkpoints of it (steps), and a script that plays two machines
    with them (two_boxes.sh)."""
    only_files: bool = False
    """With --keep: make the model, the checkpoints and the script, and run nothing. Needs no torch."""
    engine: DemoEngine = "transformers"
    """The nodes' engine."""
    vllm_python: Path | None = None
    """Python of the environment that has vLLM and the plugin; without it, this one's."""

    def __post_init__(self) -> None:
        if not 2 <= self.nodes <= 32:
            raise UsageError("--nodes: 2 to 32, one of which will be killed")
        if not 1 <= self.steps <= 10_000:
            raise UsageError("--steps: 1 to 10000")
        if not 0 <= self.seed < 1 << 32:
            raise UsageError("--seed: 0 to 2^32 - 1")
        if self.keep is not None:
            folder = Path(KEPT) if str(self.keep).lower() in ("1", "true", "yes") else self.keep
            object.__setattr__(self, "keep", folder.expanduser().absolute())
        elif self.only_files:
            raise UsageError("--only-files goes with --keep FOLDER, which says where.")

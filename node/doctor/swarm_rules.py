"""The rules about the ticket, the seed and the way to them. Pure."""

from typing import Final

from node.doctor.facts import Facts, NeighbourFacts, Rate, VisitFacts
from node.doctor.lines import Line, costs, ok, skipped, stops
from swarm.protocol.core.boots import latest_boot
from swarm.protocol.core.reach import Scope, scope
from swarm.transport.connection.addresses import host_and_port_of

__all__ = ["address", "clock", "neighbour", "seed", "seed_rate", "ticket", "udp"]

SLOW_MBIT: Final = 20.0
"""Below it, a 1 % step of an 8B model (70 MB) takes more than half a minute."""
TELLING_S: Final = 1.5
"""Seconds after which a connection has found its rate, on a round trip of `FAR_MS` nearly."""
FAR_MS: Final = 400.0
"""Round trip above which a machine is at the far end of a bad line."""
CLOCK_S: Final = 60.0
"""Clocks that are kept by NTP differ by milliseconds."""
_NO_TICKET: Final = "no ticket was given, so the swarm was not looked at"
_ASK: Final = "ask for a new ticket: swarm-node invite, on the seed's machine"


def ticket(facts: Facts) -> Line:
    """Whether the ticket can be read and admits this machine."""
    if facts.ticket_error:
        return stops(facts.ticket_error, "this machine cannot join", _ASK)
    found = facts.ticket
    if found is None:
        return skipped(_NO_TICKET, "swarm-node doctor TICKET")
    visit = facts.visit or VisitFacts()
    now = _seed_time(facts)
    if visit.refused:
        return stops(f"the seed refuses this machine: {visit.refused}", "this machine cannot join", _ASK)
    if found.expires <= now:
        text = f"the ticket expired {_ago(now - found.expires)} ago"
        if visit.welcomed:
            return ok(f"{text}, but this machine is a member already")
        return stops(text, "this machine cannot join", _ASK)
    return ok(f"of the swarm {found.swarm[-8:]}, for another {_ago(found.expires - now)}")


def seed(facts: Facts) -> Line:
    """Whether the seed answers, and is the seed."""
    visit = facts.visit
    if facts.ticket is None or visit is None:
        return skipped(facts.running or _NO_TICKET)
    if visit.listen_error:
        return skipped("not dialed, because this machine cannot listen (see address)")
    if not any(dial.rtt_ms is not None for dial in visit.dials):
        tried = "; ".join(f"{dial.address}: {dial.error}" for dial in visit.dials)
        return stops(f"no address of the ticket answers ({tried})", "this machine cannot join", _unreachable(visit))
    if not visit.connected:
        return stops(
            f"something answers at the ticket's address, but not this swarm's seed ({visit.connect_error})",
            "this machine cannot join",
            _ASK + "; the present one leads to another program",
        )
    if not visit.welcomed and not visit.refused:
        return stops(
            f"the seed was reached, but did not answer the request to join ({visit.connect_error})",
            "this machine cannot join",
            "look at the seed's log, and try again",
        )
    rtt = visit.rtt_ms or min(dial.rtt_ms for dial in visit.dials if dial.rtt_ms is not None)
    text = f"it answers after {rtt:.0f} ms"
    if rtt > FAR_MS:
        return costs(text, "each version starts late here", "use a machine nearer to the trainer, or another uplink")
    return ok(text)


def clock(facts: Facts) -> Line:
    """Whether this machine's clock is right, by the seed's."""
    visit = facts.visit
    mend = "timedatectl set-ntp true (a container has its host's clock: tell the provider)"
    if visit is None or visit.seed_time is None or visit.own_time is None:
        return skipped("compared with the seed's only, which was not reached")
    skew_s = visit.own_time - visit.seed_time
    text = f"{_ago(abs(skew_s))} {'ahead of' if skew_s > 0 else 'behind'} the seed's"
    if visit.seed_boot > latest_boot(visit.own_time):
        return stops(text, "this machine takes the seed for one with a wrong clock, and ignores its messages", mend)
    if abs(skew_s) > CLOCK_S:
        return costs(text, "log lines and the days of --up-gb-day are wrong; a month would stop the node", mend)
    return ok("agrees with the seed's")


def address(facts: Facts) -> Line:
    """Whether others can dial this machine: its NAT, and its mapped port."""
    visit = facts.visit
    if visit is not None and visit.listen_error:
        return stops(visit.listen_error, "the node does not start", "swarm-node join --listen with a free port, or 0")
    if visit is None or not visit.welcomed:
        return skipped(facts.running or "the seed was not reached, so nobody dialed back")
    nat = _nat(visit)
    if visit.dialable:
        return ok(f"the seed reached this machine; {nat}")
    claimed = ", ".join(visit.claimed) or "no address"
    text = f"the seed cannot reach this machine at {claimed}; {nat}"
    price = "other members cannot dial it, so it takes fewer children and may need a relay"
    if visit.relayed:
        return ok(f"reached through the relay of --via; {nat}")
    if visit.seen_by_seed is not None and scope(visit.seen_by_seed) < Scope.WORLD and _all_public(visit.claimed):
        return costs(
            text + ", though both are in one network: its router leads no connection back in (no hairpin)", price,
            f"announce this machine's address in that network: --announce {_inside(visit)}",
        )  # fmt: skip
    if facts.machine.provider and not facts.machine.mapped_ports:
        return costs(text, price, f"map port 4001 in the template of {facts.machine.provider}, and start again")
    if facts.machine.provider:
        ports = ", ".join(map(str, facts.machine.mapped_ports))
        return costs(text, price, f"listen on a mapped port (mapped: {ports}): swarm-node join --listen PORT")
    if _symmetric(visit):
        return costs(
            text, price + "; hole punching fails behind such a NAT",
            "swarm-node relay TICKET on a machine with a public address, and here: --via THAT-MACHINE:4001",
        )  # fmt: skip
    return costs(
        text, price, "open the port, and start with --listen PORT --announce PUBLIC-IP:PORT; or --via RELAY:4001"
    )


def _all_public(addrs: tuple[str, ...]) -> bool:
    return bool(addrs) and all(scope(address) == Scope.WORLD for address in addrs)


def _inside(visit: VisitFacts) -> str:
    """This machine's address in its own network, as --announce takes it."""
    seen = host_and_port_of(visit.seen_by_seed or "")
    return f"{seen[0] if seen else 'HOST'}:{visit.own_port}"


def _nat(visit: VisitFacts) -> str:
    """The kind of NAT, in words."""
    seen = host_and_port_of(visit.seen_by_seed or "")
    if visit.seen_by_seed is None or seen is None or visit.own_port is None:
        return "the kind of NAT is not known"
    host, port = seen
    if host in {own[0] for own in map(host_and_port_of, visit.own_addresses) if own is not None}:
        return (
            "no NAT before the seed" if scope(visit.seen_by_seed) < Scope.WORLD else "no NAT: its own address is public"
        )
    if _symmetric(visit):
        return f"behind a symmetric NAT ({host}): each target sees another port"
    if port == visit.own_port:
        return f"behind a NAT that keeps ports ({host})"
    return f"behind a NAT that changes ports ({host}: {visit.own_port} is seen as {port})"


def _symmetric(visit: VisitFacts) -> bool:
    one, other = host_and_port_of(visit.seen_by_seed or ""), host_and_port_of(visit.seen_by_neighbour or "")
    return one is not None and other is not None and one[0] == other[0] and one[1] != other[1]


def seed_rate(facts: Facts) -> Line:
    """The rate from the seed."""
    visit = facts.visit
    if visit is None or not visit.welcomed:
        return skipped(facts.running or "the seed was not reached")
    if not visit.rate.nbytes:
        return skipped(f"not measured: {visit.rate.error or 'the seed sent no block'}")
    return _judged(_said(visit.rate), visit.rate, facts)


def neighbour(facts: Facts) -> Line:
    """The way to another member, from which most bytes will come."""
    visit = facts.visit
    if visit is None or not visit.welcomed:
        return skipped(facts.running or "the seed was not reached")
    if visit.neighbour is None:
        return skipped("no other member that can be dialed has joined yet")
    found: NeighbourFacts = visit.neighbour
    if found.rtt_ms is None:
        return costs(
            f"{found.name} cannot be reached ({found.error})",
            "versions come from other members, or later",
            "allow outgoing TCP connections to any port",
        )
    text = f"{found.name} answers after {found.rtt_ms:.0f} ms"
    if not found.rate.nbytes:
        return ok(f"{text}; rate not measured: {found.rate.error or found.error or 'no version yet'}")
    return _judged(f"{text}, {_said(found.rate)}", found.rate, facts)


def udp(facts: Facts) -> Line:
    """Always good: a provider without UDP is no obstacle."""
    return ok("not needed: everything runs over TCP")


def _said(rate: Rate) -> str:
    return f"{rate.mbit_s:.0f} Mbit/s or more, by {rate.nbytes / 1e6:.1f} MB"


def _judged(text: str, rate: Rate, facts: Facts) -> Line:
    """A connection starts slowly, so few bytes over a long way say little: below `TELLING_S` no rate is slow."""
    if rate.mbit_s >= SLOW_MBIT or rate.seconds < TELLING_S:
        return ok(text)
    model = facts.model_bytes
    price = "versions and the model arrive late"
    if model is not None:
        price += f"; the model alone takes {_ago(model * 8 / 1e6 / rate.mbit_s)}"
    return costs(text, price, "use a machine with a better link; --model FOLDER saves fetching the model")


def _unreachable(visit: VisitFacts) -> str:
    errors = {dial.error for dial in visit.dials}
    if errors == {"refused"}:
        return "start the seed (swarm-node seed), or ask for a ticket with its present address: swarm-node invite"
    if errors == {"no route"}:
        return "connect this machine to the network: ip route"
    if errors == {"unknown name"}:
        return "correct the name server of this machine (/etc/resolv.conf), or ask for a ticket with an IP address"
    return "open the seed's port in its firewall, or announce the address that leads to it: seed --announce HOST:PORT"


def _seed_time(facts: Facts) -> float:
    visit = facts.visit
    return facts.machine.unix_time if visit is None or visit.seed_time is None else visit.seed_time


def _ago(seconds: float) -> str:
    for size, name in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"

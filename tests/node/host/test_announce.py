"""The addresses of a rented machine, from the environment that its provider sets."""

import socket
from pathlib import Path

import pytest

from codec.errors import UsageError
from node.host.announce import box_ports, reached_at, resolved, with_box_ports
from node.settings.addresses import relay_address
from node.settings.config import JoinConfig, SeedConfig

VAST = {
    "PUBLIC_IPADDR": "65.130.162.74\n",
    "VAST_TCP_PORT_22": "33526",
    "VAST_TCP_PORT_8080": "33527",
    "VAST_TCP_PORT_4001": "33528",
    "VAST_UDP_PORT_4001": "33529",
}
RUNPOD = {
    "RUNPOD_PUBLIC_IP": "194.68.245.10",
    "RUNPOD_TCP_PORT_22": "22046",
    "RUNPOD_TCP_PORT_70001": "10031",
    "RUNPOD_TCP_PORT_70000": "10030",
}


def test_a_mapped_port_is_announced() -> None:
    made = with_box_ports(SeedConfig(base=Path()), VAST)
    assert (made.listen, made.announce) == (("/ip4/0.0.0.0/tcp/4001",), ("/ip4/65.130.162.74/tcp/33528",))


def test_a_process_that_may_take_any_port_takes_one_that_leads_inside() -> None:
    made = with_box_ports(JoinConfig(), VAST)
    assert (made.listen, made.announce) == (("/ip4/0.0.0.0/tcp/4001",), ("/ip4/65.130.162.74/tcp/33528",))
    made = with_box_ports(JoinConfig(), RUNPOD)
    assert (made.listen, made.announce) == (("/ip4/0.0.0.0/tcp/10030",), ("/ip4/194.68.245.10/tcp/10030",))


def test_a_port_of_a_pair_leads_inside_by_its_own_number() -> None:
    made = with_box_ports(JoinConfig(listen=("10031",)), RUNPOD)
    assert made.announce == ("/ip4/194.68.245.10/tcp/10031",)


def test_other_programs_ports_are_left_alone() -> None:
    only_theirs = {"PUBLIC_IPADDR": "65.130.162.74", "VAST_TCP_PORT_22": "33526", "VAST_TCP_PORT_8080": "33527"}
    assert with_box_ports(JoinConfig(), only_theirs) == JoinConfig()
    made = with_box_ports(JoinConfig(listen=("8080",)), only_theirs)  # the user says that it is free
    assert made.announce == ("/ip4/65.130.162.74/tcp/33527",)


def test_addresses_from_the_user_have_precedence() -> None:
    config = JoinConfig(listen=("4001",), announce=("203.0.113.7:31001",))
    assert with_box_ports(config, VAST) is config
    assert with_box_ports(JoinConfig(listen=("4002",)), VAST).announce == ()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PUBLIC_IPADDR": "65.130.162.74"},
        {"VAST_TCP_PORT_4001": "33528"},
        VAST | {"PUBLIC_IPADDR": "$(hostname)"},
        {
            "PUBLIC_IPADDR": "65.130.162.74",
            "VAST_TCP_PORT_4001": "70000",
            "VAST_TCP_PORT_": "1",
            "VAST_TCP_PORT_X": "1",
        },
    ],
)
def test_outside_known_providers_nothing_is_announced(environment: dict[str, str]) -> None:
    assert box_ports(environment) is None
    assert with_box_ports(JoinConfig(), environment) == JoinConfig()


def test_ipv6() -> None:
    made = with_box_ports(JoinConfig(listen=("4001",)), VAST | {"PUBLIC_IPADDR": "2001:db8::1"})
    assert made.announce == ("/ip6/2001:db8::1/tcp/33528",)


def test_a_member_with_a_reservation_is_reached_at_its_relay() -> None:
    listening = ["/ip4/127.0.0.1/tcp/4001"]
    assert reached_at(JoinConfig(), listening) == tuple(listening)
    circuit = "/ip4/203.0.113.9/tcp/4001/p2p-circuit"
    assert reached_at(JoinConfig(via=("203.0.113.9:4001",)), listening) == (circuit,)
    both = JoinConfig(via=("203.0.113.9:4001",), announce=("203.0.113.7:4001",))
    assert reached_at(both, listening) == ("/ip4/203.0.113.7/tcp/4001", circuit)


def test_a_relays_address_is_taken_as_it_is_printed() -> None:
    id_ = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    assert relay_address("203.0.113.9:4001") == "/ip4/203.0.113.9/tcp/4001"
    assert relay_address(f"/dns4/box.example/tcp/1/p2p/{id_}") == f"/dns4/box.example/tcp/1/p2p/{id_}"
    for text in ("4001", "203.0.113.9:0", "203.0.113.9:4001/p2p/Qm", "/ip4/203.0.113.9/tcp/1/p2p-circuit", ""):
        with pytest.raises(UsageError):
            relay_address(text)
    with pytest.raises(UsageError, match="--via"):
        JoinConfig(via=tuple(f"203.0.113.9:{port}" for port in range(1, 5)))


def test_host_names_are_resolved_before_they_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(host: str, port: object, family: int, kind: int) -> list[tuple]:
        if host == "nowhere.example":
            raise socket.gaierror(-2, "Name or service not known")
        return [(family, kind, 6, "", ("2001:db8::7", 0, 0, 0) if family == socket.AF_INET6 else ("198.51.100.7", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    config = JoinConfig(announce=("box.example:31001", "/dns6/box.example/tcp/2"), via=("relay.example:4001",))
    made = resolved(config)
    assert made.announce == ("/ip4/198.51.100.7/tcp/31001", "/ip6/2001:db8::7/tcp/2")
    assert made.via == ("/ip4/198.51.100.7/tcp/4001",)
    with pytest.raises(UsageError, match=r"nowhere\.example"):
        resolved(JoinConfig(announce=("nowhere.example:1",)))

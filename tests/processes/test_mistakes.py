"""Mistakes of users, against a real seed: each ends with a clear message and the right exit code."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit import all_hold, check, checkpoint, holds, root_of, step, ticket_of, weights

from codec.sign import Key
from node.host.port import free_port
from node.settings import keyfile
from scenarios.harness.swarm import NODE, Swarm, swarm_in

FIRST = weights()
SECOND = step(FIRST, 1)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """One seed for all tests of this file; it must serve until the end."""
    folder = tmp_path_factory.mktemp("mistakes")
    base = checkpoint(folder / "base", FIRST)
    checkpoint(folder / "other", weights(5, 1000))
    checkpoint(folder / "step_1", SECOND)
    with swarm_in(folder) as swarm:
        swarm.seed(base)
        yield swarm
        assert swarm.signal("seed") == 143
        assert "Traceback" not in swarm.log("seed", 1 << 20)


def seed_of(swarm: Swarm) -> tuple[Key, int]:
    """The running seed's key and port."""
    return keyfile.load(swarm.home("seed") / "authority.key"), int(swarm.state("seed")["addrs"][0].rpartition("/")[2])


@pytest.mark.slow
def test_an_unusable_ticket_is_refused_with_a_reason(swarm: Swarm) -> None:
    key, port = seed_of(swarm)
    other = Key(bytes(32))
    wait = ("--wait-for-seed", "2s")
    elsewhere, absent, forged, expired = swarm.together(
        ("a", "join", ticket_of(other, port), *NODE, *wait),
        ("b", "relay", ticket_of(key, free_port()), "--listen", "127.0.0.1:0", *wait),
        ("c", "join", ticket_of(key, port, signer=other), *NODE),
        ("d", "relay", ticket_of(key, port, expires_s=-1.0), "--listen", "127.0.0.1:0"),
    )
    check(elsewhere, 3, "cannot be reached", "answered", within_s=30.0)
    check(absent, 3, "Connection refused", "--wait-for-seed", within_s=30.0)
    check(forged, 2, "not one of this swarm")
    check(expired, 2, "expired", "swarm-node invite")
    assert swarm.state("seed")["nodes"] == []


@pytest.mark.slow
def test_a_port_or_home_in_use_is_reported_and_left_alone(swarm: Swarm) -> None:
    key, port = seed_of(swarm)
    base, ticket = str(swarm.folder / "base"), ticket_of(key, port)
    at = ("--listen", f"127.0.0.1:{port}")
    seed_port, node_port, seed_home, bad_address = swarm.together(
        ("e", "seed", "--base", base, *at),
        ("f", "join", ticket, "--engine", "none", *at),
        ("seed", "seed", "--base", base, "--listen", "127.0.0.1:0"),
        ("g", "seed", "--base", base, "--listen", "192.0.2.7:4001"),
    )
    for ended in (seed_port, node_port):
        check(ended, 2, f"Port {port} .* in use")
    check(seed_home, 2, "nother process")
    check(bad_address, 2, "192.0.2.7")
    assert swarm.state("seed")["role"] == "seed"
    # The failed command left no state that prevents the same command with a free port.
    swarm.node("f", ticket)
    swarm.until("f", holds(root_of(FIRST)))
    assert swarm.signal("f", signal.SIGINT) == 130


@pytest.mark.slow
def test_another_model_is_refused_before_anything_is_sent(swarm: Swarm) -> None:
    key, port = seed_of(swarm)
    other, cut = swarm.folder / "other", swarm.folder / "cut"
    shutil.copytree(swarm.folder / "step_1", cut)
    with open(cut / "model.safetensors", "r+b") as file:
        file.truncate(100_000)
    join, nowhere, publish, truncated, missing, no_seed = swarm.together(
        ("h", "join", ticket_of(key, port), *NODE, "--model", str(other)),
        ("i", "join", ticket_of(key, port), *NODE, "--model", "/nonexistent/model"),
        ("seed", "publish", str(other)),
        ("seed", "publish", str(cut)),
        ("seed", "publish", str(swarm.folder / "nothing")),
        ("h", "publish", str(other)),
    )
    check(join, 2, "another model")
    check(nowhere, 2, "does not exist")
    check(publish, 2, "another model than the seed's base", r"BF16 1000 in it, BF16 60000 in the base")
    check(truncated, 2, "damaged")
    check(missing, 2, "does not exist")
    check(no_seed, 3, "No seed", "swarm-node seed")
    assert swarm.state("seed")["head"] == [0, 0]


@pytest.mark.slow
def test_a_seed_does_not_start_with_another_base_or_a_bad_key(swarm: Swarm, tmp_path: Path) -> None:
    """Another base than the home's, a key that other users can read, a malformed key file."""
    base, homes = str(swarm.folder / "base"), [tmp_path / name for name in ("model", "open", "garbage")]
    for home in homes:
        keyfile.write(home / "authority.key", Key(bytes(32)))
    (homes[1] / "authority.key").chmod(0o644)
    (homes[2] / "authority.key").write_bytes(b"\x00garbage")
    with swarm_in(tmp_path) as own:
        own.seed(Path(base), name="model")
        assert own.signal("model", signal.SIGINT) == 130
        listen = ("--listen", "127.0.0.1:0")
        model, readable, garbage = own.together(
            ("model", "seed", "--base", str(swarm.folder / "other"), *listen),
            ("open", "seed", "--base", base, *listen),
            ("garbage", "seed", "--base", base, *listen),
        )
        check(model, 2, "another model", "--base")
        check(readable, 2, "chmod 600")
        check(garbage, 2, "not a swarm-node key file")
        own.seed(Path(base), name="model")  # with the right base it continues


@pytest.mark.slow
def test_a_node_waits_for_its_seed_and_outlives_it(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", FIRST)
    next_one = checkpoint(tmp_path / "step_1", SECOND)
    key, port = Key(bytes([7]) * 32), free_port()
    keyfile.write(tmp_path / "seed" / "authority.key", key)
    with swarm_in(tmp_path) as swarm:
        at = ("--listen", f"127.0.0.1:{port}")
        swarm.node("box", ticket_of(key, port))
        swarm.until_logged("box", '"unreachable"')
        swarm.seed(base, *at)
        swarm.until("box", holds(root_of(FIRST)))
        assert swarm.signal("seed", signal.SIGKILL) == -9
        swarm.seed(base, *at)
        swarm.until("seed", all_hold([0, 0], 1), within_s=20.0)
        swarm.publish(next_one)
        swarm.until("box", holds(root_of(SECOND)), within_s=20.0)

"""Settings: the values that a constructor accepts, and the precedence of sources."""

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from codec.errors import UsageError
from node.cli.app import app
from node.settings.addresses import address, host_and_port
from node.settings.config import (
    DemoConfig,
    GatewayConfig,
    InviteConfig,
    JoinConfig,
    PeerConfig,
    RelayConfig,
    SeedConfig,
    duration_s,
)
from node.settings.sources import CONFIGURABLE, explain


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4001", "/ip4/0.0.0.0/tcp/4001"),
        (":0", "/ip4/0.0.0.0/tcp/0"),
        ("203.0.113.7:4001", "/ip4/203.0.113.7/tcp/4001"),
        ("[2001:db8::1]:4001", "/ip6/2001:db8::1/tcp/4001"),
        ("box.example:31001", "/dns/box.example/tcp/31001"),
        (" /ip4/203.0.113.7/tcp/04001 ", "/ip4/203.0.113.7/tcp/4001"),
        ("/dns4/box.example/tcp/1", "/dns4/box.example/tcp/1"),
    ],
)
def test_addresses_become_multiaddrs(text: str, expected: str) -> None:
    assert address(text) == expected
    assert address(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "box.example", "1.2.3:4001", "1.2.3.4:65536", "1.2.3.4:-1", "a b:1", "box\x1b[2J:1", "-box:1"),
        *("/ip4/1.2.3.4/udp/4001", "/ip4/1.2.3.4/tcp/1/ws", "/ip4/1.2.3.4", "/ip4/box/tcp/1", "/ip6/1.2.3.4/tcp/1"),
        *("/unix/tmp/x", "[::1:4001", "::1"),
    ],
)
def test_an_invalid_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"4001"):
        address(text)


def test_durations() -> None:
    assert [duration_s(text) for text in ("90s", "15m", "24h", "7d", "1.5h")] == [90, 900, 86400, 604800, 5400]
    for text in ("24", "h", "-1h", "0s", "1w", "24 h", "1e9d"):
        with pytest.raises(UsageError, match="write it like"):
            duration_s(text)


def test_settings_are_canonical_and_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = JoinConfig(home=Path("here"), listen=("4001",), announce=("box.example:31001",))
    assert config.home == tmp_path / "here"
    assert config.listen == ("/ip4/0.0.0.0/tcp/4001",)
    assert config.announce == ("/dns/box.example/tcp/31001",)
    with pytest.raises(FrozenInstanceError):
        config.up_mbit = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "flag"),
    [
        (lambda: JoinConfig(up_mbit=-1), "--up-mbit"),
        (lambda: RelayConfig(down_mbit=-1), "--down-mbit"),
        (lambda: RelayConfig(up_mbit=float("nan")), "--up-mbit"),
        (lambda: JoinConfig(threads=0), "--threads"),
        (lambda: JoinConfig(device="gpu"), "--device"),
        (lambda: JoinConfig(announce=("1.2.3.4:0",)), "--announce"),
        (lambda: JoinConfig(listen=()), "--listen"),
        (lambda: SeedConfig(base=Path(), listen=("1", "2", "3", "4", "5")), "--listen"),
        (lambda: SeedConfig(base=Path(), shards=1), "--shards"),
        (lambda: SeedConfig(base=Path(), shards=65), "--shards"),
        (lambda: SeedConfig(raw_mb=1, shards=4), "--shards"),
        (lambda: JoinConfig(shard="1/4"), "--shard"),
        (lambda: JoinConfig(name="x" * 65), "--name"),
        (lambda: InviteConfig(nodes=0), "--nodes"),
        (lambda: InviteConfig(expires="soon"), "soon"),
        (lambda: InviteConfig(quota_gb=-1), "--quota-gb"),
        (lambda: DemoConfig(nodes=1), "--nodes"),
        (lambda: DemoConfig(steps=0), "--steps"),
        (lambda: JoinConfig(engine="vllm", engine_holds="format"), "add --engine vllm --format int4-group-e8"),
        (
            lambda: JoinConfig(format=("int4-group-e8",), engine_holds="format"),
            "only a vLLM computes with packed codes",
        ),
        (
            lambda: JoinConfig(engine="vllm", format=("int4-group",), engine_holds="format"),
            "only with those of int4-group-e8",
        ),
        (
            lambda: JoinConfig(format=("int4-group-e8",), engine_holds="format", engine_url=("http://127.0.0.1:1",)),
            "leave out --engine-url",
        ),
    ],
)
def test_an_invalid_value_is_refused_with_its_flag(make, flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        make()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_planned_rates_without_flags() -> None:
    def links(config: PeerConfig) -> tuple[float, float]:
        return config.planned_up_mbit, config.planned_down_mbit

    assert links(RelayConfig()) == (100.0, 100.0)
    assert links(RelayConfig(up_mbit=0)) == (0.0, 100.0)
    assert links(RelayConfig(up_mbit=400)) == (400.0, 400.0)
    assert links(RelayConfig(up_mbit=400, down_mbit=50)) == (400.0, 50.0)


def test_each_source_has_precedence_over_the_one_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def up_mbit(command: str = "join") -> tuple[object, str]:
        entry = explain(app, command)["up_mbit"]
        return entry["value"], entry["source"]

    assert up_mbit() == (None, "default")
    file = folder / "swarm.toml"
    file.write_text("up-mbit = 150\n")
    assert up_mbit() == ("150", "swarm.toml:1")
    file.write_text("up_mbit = 150\n[join]\nup_mbit = 200\n")
    assert up_mbit() == ("200", "swarm.toml:3")
    assert up_mbit("relay") == ("150", "swarm.toml:1")
    monkeypatch.setenv("SWARM_UP_MBIT", "250")
    assert up_mbit() == ("250", "SWARM_UP_MBIT")


def test_explain_names_every_setting(folder: Path) -> None:
    for command, config in CONFIGURABLE.items():
        assert set(explain(app, command)) == {field.name for field in fields(config)}


def test_lists_come_from_every_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "swarm.toml").write_text('listen = ["4001", "4002"]\n')
    assert explain(app, "join")["listen"] == {"value": ["4001", "4002"], "source": "swarm.toml:1"}
    monkeypatch.setenv("SWARM_LISTEN", "5001 5002")
    assert explain(app, "join")["listen"] == {"value": ["5001", "5002"], "source": "SWARM_LISTEN"}


@pytest.mark.parametrize(
    ("content", "error_text"),
    [
        ("up_mbti = 1\n", "up_mbit"),
        ("[jion]\nup_mbit = 1\n", "join"),
        ("join = 3\n", "join"),
        ("up_mbit = \n", "cannot be read"),
        ("home = '\udcff'\n", "cannot be read"),
    ],
)
def test_an_invalid_file_is_refused(folder: Path, content: str, error_text: str) -> None:
    (folder / "swarm.toml").write_text(content, errors="surrogateescape")
    with pytest.raises(UsageError, match=error_text):
        explain(app, "join")


def test_swarm_config_names_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = folder / "other.toml"
    monkeypatch.setenv("SWARM_CONFIG", str(other))
    with pytest.raises(UsageError, match="no such file"):
        explain(app, "join")
    other.write_text("region = 'eu'\n")
    assert explain(app, "join")["region"] == {"value": "eu", "source": f"{other}:1"}


def test_coder_and_replica(tmp_path: Path) -> None:
    assert SeedConfig(base=tmp_path, coder="pco").coder == "pco"
    with pytest.raises(UsageError, match="--node-cores"):
        SeedConfig(base=tmp_path, node_cores=0)
    with pytest.raises(UsageError, match="--engine none"):
        JoinConfig(replica="none")
    assert JoinConfig(replica="none", engine="none").replica == "none"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("::1", r"in brackets, then the port, like \[2001:db8::1\]:4001"),
        ("::1:4001", r"in brackets, then the port"),
        ("[::1]", r"in brackets, then the port"),
        ("2001:db8::1", r"in brackets, then the port"),
        ("[fe80::1%eth0]:4001", r"names a zone"),
        ("/ip6/fe80::1%eth0/tcp/4001", r"names a zone"),
    ],
)
def test_an_ipv6_address_that_cannot_be_meant_is_refused_with_the_form_to_write(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        address(text)


def test_ipv6_forms() -> None:
    assert address("[::1]:4001") == address("/ip6/::1/tcp/4001") == "/ip6/::1/tcp/4001"
    assert host_and_port("[::1]:9464") == ("::1", 9464)
    assert GatewayConfig(at="[::1]:8000").host == "::1"

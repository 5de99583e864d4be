"""Keys with quotas: kept hashed, counted each by itself, and shown in the status and the metrics."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import trio
from gateway_kit import SpellingEngine, gateway, until, with_client
from openai import AuthenticationError, RateLimitError

from codec.errors import UsageError
from node.cli.app import run
from node.gateway.clients import Client, Clients, OverQuota
from node.settings.client_keys import KEYS_FILE, Quota, add_key, digest_of, read_keys, remove_key


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_key_is_kept_as_a_hash_in_a_file_of_its_owner(tmp_path: Path):
    path = tmp_path / "home" / KEYS_FILE
    assert read_keys(path) is None
    key = add_key(path, "anna", Quota(60, 1000, 4))
    other = add_key(path, "ben")
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = read_keys(path)
    assert found is not None
    assert [(k.name, k.digest, k.quota) for k in found] == [
        ("anna", digest_of(key), Quota(60, 1000, 4)),
        ("ben", digest_of(other), Quota()),
    ]
    with pytest.raises(UsageError, match="already"):
        add_key(path, "anna")
    with pytest.raises(UsageError, match="1 to 64"):
        add_key(path, "a b")
    remove_key(path, "anna")
    with pytest.raises(UsageError, match="no key"):
        remove_key(path, "anna")
    path.write_text("{")
    with pytest.raises(UsageError, match="not a file of gateway keys"):
        add_key(path, "eve")
    assert path.read_text() == "{"


def test_who_is_a_client(tmp_path: Path):
    clock = Clock()
    path = tmp_path / KEYS_FILE
    clients = Clients(path, "", clock)
    assert clients.find("") is not None, "there is no key, so any process that connects is a client"
    key = add_key(path, "anna")
    clock.now = 2.0
    assert clients.find("") is None
    found = clients.find(f"Bearer {key}")
    assert found is not None
    assert found.name == "anna"
    assert clients.find(f"Basic {key}") is clients.find("Bearer no") is clients.find(key) is None
    remove_key(path, "anna")
    assert clients.find(f"Bearer {key}") is found, "the file is looked at once a second"
    clock.now = 4.0
    assert clients.find(f"Bearer {key}") is None
    path.unlink()
    clock.now = 6.0
    assert clients.find("") is None, "a file that is deleted does not open the gateway"
    assert Clients(path, "k", clock).find("Bearer k") is not None


def test_a_change_of_the_file_keeps_what_was_counted_and_a_broken_one_changes_nothing(tmp_path: Path):
    clock, path = Clock(), tmp_path / KEYS_FILE
    key = add_key(path, "anna", Quota(1))
    clients = Clients(path, "", clock)
    anna = clients.find(f"Bearer {key}")
    assert anna is not None
    anna.admit()
    add_key(path, "ben")
    clock.now = 2.0
    assert clients.find(f"Bearer {key}") is anna
    with pytest.raises(OverQuota):
        anna.admit()
    path.write_text("rubbish")
    clock.now = 4.0
    assert clients.find(f"Bearer {key}") is anna
    assert set(clients.status()) == {"anna", "ben"}


def test_requests_and_tokens_leak_at_their_rates():
    clock = Clock()
    client = Client("anna", Quota(requests_per_minute=2, tokens_per_minute=600, in_flight=3), clock)
    client.admit()
    client.admit()
    with pytest.raises(OverQuota, match="2 requests a minute") as caught:
        client.admit()
    assert caught.value.retry_s == 30
    clock.now = 30.0
    client.admit()
    with client.flight(2, 100):
        with pytest.raises(OverQuota, match="2 sequences"), client.flight(2, 1):
            pytest.fail("there is no room")
        client.use(1100)
    assert client.in_flight == 0
    clock.now = 60.0
    with pytest.raises(OverQuota, match="600 tokens a minute") as caught:
        client.admit()
    assert caught.value.retry_s == 31, "1,200 were used, 300 have leaked, and one more has to fit below 600"
    clock.now = 91.0
    client.admit()
    assert (client.requests, client.tokens, client.refused) == (4, 1200, 3)
    with pytest.raises(OverQuota), client.flight(1, 10_000):
        pytest.fail("the bucket is not empty")
    clock.now = 900.0
    with client.flight(1, 10_000):
        pass


async def test_each_key_has_its_quota_and_its_counts(tmp_path: Path):
    path = tmp_path / KEYS_FILE
    anna, ben = add_key(path, "anna", Quota(requests_per_minute=2)), add_key(path, "ben", Quota(in_flight=1))
    async with gateway(tmp_path, keys=path) as (swarm, url):
        await swarm.add(1, engine=SpellingEngine(0.05))

        async def ask(client: Any, key: str, **more: Any) -> Any:
            body = {"model": "policy", "prompt": "ab", "max_tokens": 3} | more
            return await client.with_options(api_key=key).completions.create(**body)

        async def use(client: Any) -> Any:
            with pytest.raises(AuthenticationError):
                await ask(client, "wrong")
            await ask(client, anna)
            stream = await ask(client, anna, stream=True)
            assert [part async for part in stream]
            with pytest.raises(RateLimitError) as over:
                await ask(client, anna)
            await ask(client, ben)
            with pytest.raises(RateLimitError) as flights:
                await ask(client, ben, n=2)
            return over.value, flights.value

        over, flights = await with_client(url, use)
        assert (over.code, over.type) == ("rate_limit_exceeded", "rate_limit_error")
        assert 1 <= int(over.response.headers["retry-after"]) <= 30
        assert flights.response.headers["retry-after"] == "1"
        status = swarm.service.status().clients
        counts = {name: (c.requests, c.tokens, c.refused, c.in_flight) for name, c in status.items()}
        assert counts == {"anna": (2, 10, 1, 0), "ben": (2, 5, 1, 0)}
        from node.monitor.metrics import families
        from node.monitor.observations import Observations
        from node.status.schema import SeedStatus

        seed = SeedStatus(work=swarm.service.status())
        names = {metric.name: metric for metric in families(seed, Observations(), "1")}
        samples = {(s.labels["key"], s.labels.get("result")): s.value for s in names["swarm_gateway_requests"].samples}
        assert samples[("anna", "refused")] == 1
        remove_key(path, "ben")

        async def removed(client: Any) -> bool:
            try:
                await ask(client, ben)
            except AuthenticationError:
                return True
            return False

        with trio.fail_after(5):
            while not await with_client(url, removed):  # noqa: ASYNC110 - the file is looked at once a second
                await trio.sleep(0.2)
    await until(lambda: not swarm.service.clients)


def test_the_commands_make_list_and_remove_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    home = ["--home", str(tmp_path)]
    assert run(["gateway", "key", "list", *home]) == 0
    assert "There is no key" in capsys.readouterr().out
    assert run(["gateway", "key", "add", "anna", "--requests-per-minute", "60", "--in-flight", "4", *home]) == 0
    key = capsys.readouterr().out.strip()
    (kept,) = read_keys(tmp_path / KEYS_FILE) or []
    assert (kept.digest, kept.quota) == (digest_of(key), Quota(60, 0, 4))
    assert run(["gateway", "key", "list", *home]) == 0
    assert "60 requests a minute, 4 sequences in flight" in capsys.readouterr().out
    assert run(["gateway", "key", "list", "--json", *home]) == 0
    shown = capsys.readouterr().out
    assert '"anna"' in shown
    assert kept.digest not in shown
    assert run(["gateway", "key", "remove", "anna", *home]) == 0
    assert read_keys(tmp_path / KEYS_FILE) == []
    assert run(["gateway", "key", "remove", "anna", *home]) == 2
    assert run(["gateway", "key", "add", "ben", "--in-flight", "-1", *home]) == 2
    assert os.listdir(tmp_path)

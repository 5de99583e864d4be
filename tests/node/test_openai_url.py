"""`swarm.openai_url`: an endpoint for the trainer, served by the seed until the trainer closes its swarm."""

import os
import resource
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from seed_kit import running

from node import Swarm


def test_the_url_serves_until_the_swarm_is_closed(tmp_path: Path):
    with running(tmp_path) as seed:
        with Swarm.attach(home=tmp_path, start=False) as swarm:
            url = swarm.openai_url
            assert swarm.openai_url == url
            client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=20.0)
            answer = client.completions.create(
                model="policy", prompt=[5, 6], n=2, max_tokens=3, extra_body={"stop_token_ids": [2]}
            )
            assert [choice.model_extra["token_ids"] for choice in answer.choices] == [[9, 10, 2], [9, 11, 2]]
            assert answer.choices[0].model_extra["versions"] == [[0, 0]] * 3
            assert seed.call(seed.service.status).groups_ready == 0
        with pytest.raises((urllib.error.URLError, ConnectionError)):  # or a reset, since it was just closed
            urllib.request.urlopen(f"{url}/models", timeout=5.0)


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """All descriptors that `select.select` takes are in use, as in a trainer with many files and connections."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2048), before[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_clients_are_told_to_wait_while_the_seed_is_down(tmp_path: Path, many_open_files: None):
    with running(tmp_path):
        swarm = Swarm.attach(home=tmp_path, start=False)
        url = swarm.openai_url
    with swarm, pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{url}/models", timeout=10.0)
    assert refused.value.code == 503
    assert refused.value.headers["Retry-After"]

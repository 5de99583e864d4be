"""`swarm.openai_url`: an endpoint for the trainer, served by the seed until the trainer closes its swarm."""

import urllib.error
import urllib.request
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

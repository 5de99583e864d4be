"""These tests use the WAN emulator, which needs root. Otherwise they are skipped; `--no-skips` makes that a failure."""

import sys
from pathlib import Path

import pytest

from codec.errors import UsageError
from scenarios.emulator.network import check_privileges

# Under `--import-mode=importlib` no test folder is on the path.
sys.path.insert(0, str(Path(__file__).parents[1] / "processes"))


@pytest.fixture(autouse=True)
def _can_emulate() -> None:
    try:
        check_privileges()
    except UsageError as error:
        pytest.skip(str(error))

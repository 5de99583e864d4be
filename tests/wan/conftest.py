"""These tests use the WAN emulator, which needs root. Otherwise they are skipped; `--no-skips` makes that a failure."""

import pytest

from codec.errors import UsageError
from scenarios.emulator.network import check_privileges


@pytest.fixture(autouse=True)
def _can_emulate() -> None:
    try:
        check_privileges()
    except UsageError as error:
        pytest.skip(str(error))

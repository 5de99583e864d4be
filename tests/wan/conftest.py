"""These tests need the WAN emulator, and so root. Elsewhere they skip, which `--no-skips` counts as failed."""

import pytest

from codec.errors import UsageError
from scenarios.emulator.network import check_privileges


@pytest.fixture(autouse=True)
def _can_emulate() -> None:
    try:
        check_privileges()
    except UsageError as error:
        pytest.skip(str(error))

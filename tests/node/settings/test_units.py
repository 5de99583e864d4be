"""Numbers and text as people read them."""

import pytest

from node.settings.text import printable
from node.settings.units import version_text


@pytest.mark.parametrize(("version", "text"), [(None, "-"), ((0, 7), "7"), ((2, 0), "0 (epoch 2)")])
def test_a_version_names_its_epoch_after_a_rollback_only(version: tuple[int, int] | None, text: str) -> None:
    assert version_text(version) == text


def test_text_of_a_peer_cannot_control_a_terminal() -> None:
    assert printable("bö x\x1b[2J\n\x9b\u202e") == "bö x?[2J???"

"""The phases of a catch-up, and which phase may follow which."""

import pytest

from swarm.protocol.transfer.catchup_phases import TRANSITIONS, Phase, PhaseCause, next_phase


def test_all_phases_from_nothing_to_a_version() -> None:
    phase = Phase.IDLE
    for cause in (
        PhaseCause.LAYOUT_UNKNOWN,
        PhaseCause.LAYOUT_STORED,
        PhaseCause.FILES_STORED,
        PhaseCause.PERHAPS_OLDER,
        PhaseCause.CHAIN_NOT_FOUND,
        PhaseCause.COMPARED,
        PhaseCause.BLOCKS_STORED,
        PhaseCause.REPLAY_BAD,
        PhaseCause.BLOCKS_STORED,
        PhaseCause.REPLAYED,
    ):
        phase = next_phase(phase, cause)
    assert phase is Phase.IDLE


@pytest.mark.parametrize("phase", Phase)
def test_a_catch_up_may_start_again_from_every_phase(phase: Phase) -> None:
    assert next_phase(phase, PhaseCause.LAYOUT_UNKNOWN) is Phase.LAYOUT
    assert next_phase(phase, PhaseCause.LAYOUT_KNOWN) is Phase.HASHES


@pytest.mark.parametrize("phase", Phase)
def test_a_transition_that_is_not_in_the_table_is_a_bug(phase: Phase) -> None:
    for cause in set(PhaseCause) - set(TRANSITIONS[phase]):
        with pytest.raises(RuntimeError):
            next_phase(phase, cause)

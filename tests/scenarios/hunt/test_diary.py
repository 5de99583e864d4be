"""What availability is computed from: when a fault was noticed, and when everything went on."""

from scenarios.hunt.diary import Diary
from swarm.protocol.core.version import VersionId


def version(number: int) -> VersionId:
    return VersionId(0, number)


def test_a_fault_is_noticed_by_the_first_word_of_that_machine_after_it() -> None:
    diary = Diary(noticed_s=[(1.0, b"node"), (12.0, b"other"), (13.5, b"node"), (14.0, b"node")])
    assert diary.noticed_after(12.0, b"node") == 1.5
    assert diary.noticed_after(15.0, b"node") is None


def test_all_goes_on_when_a_later_version_is_held_by_all_and_a_rollout_was_accepted() -> None:
    diary = Diary(
        sealed_s={version(1): 3.0, version(2): 11.0, version(3): 16.0},
        accepted_s=[2.0, 12.5],
        whole_s=[(4.0, version(1)), (10.5, version(1)), (12.0, version(2)), (17.0, version(3))],
    )
    assert diary.whole_after(10.0) == 2.5
    assert diary.whole_after(11.5) == 5.5
    assert diary.whole_after(13.0) is None


def test_a_version_that_not_everybody_holds_is_no_end() -> None:
    diary = Diary(sealed_s={version(2): 11.0}, accepted_s=[12.0], whole_s=[(11.5, version(1))])
    assert diary.whole_after(10.0) is None

"""How wake-ups of a process are counted."""

import os
import threading

from scenarios.bench.idle import Usage


def usage(**wakeups: int) -> Usage:
    return Usage(1.0, wakeups, 1.0, 1.0, len(wakeups))


def test_threads_that_end_take_no_wakeups_away_and_new_ones_add_theirs() -> None:
    before = usage(main=100, ended=5000)
    assert usage(main=130).wakeups_since(before) == 30
    assert usage(main=130, new=7).wakeups_since(before) == 37


def test_each_thread_of_a_process_is_counted() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        found = Usage.of(os.getpid())
        assert str(thread.native_id) in found.wakeups
        assert len(found.wakeups) == found.threads
    finally:
        end.set()
        thread.join()
    assert all(count >= 0 for count in found.wakeups.values())

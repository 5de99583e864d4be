"""The queues between vLLM's own processes, on a CPU, in an engine that follows a swarm."""

import os
import subprocess
from pathlib import Path

import pytest

from node.engines.vllm.server import environment

pytestmark = pytest.mark.vllm

QUEUE = """
import threading, time
from vllm.distributed.device_communicators import shm_broadcast
from swarm_vllm.waiting import sleep_between_reads

sleep_between_reads()

def polled():
    raise RuntimeError("a reader polls")

writer = shm_broadcast.MessageQueue(1, 1)
reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
ready = threading.Thread(target=writer.wait_until_ready)
ready.start()
reader.wait_until_ready()
ready.join()
shm_broadcast.sched_yield = polled
if LOST:
    writer._spin_condition.notify = lambda: None

def write():
    for i in range(20):
        time.sleep(0.01)
        writer.enqueue(i)

thread = threading.Thread(target=write)
writer.enqueue("begins")
thread.start()
print(*(reader.dequeue(timeout=20) for _ in range(21)))
thread.join()
"""


@pytest.mark.parametrize("lost", [False, True], ids=["notified", "notifications lost"])
def test_a_reader_sleeps_and_gets_every_message(lost: bool, python: Path):
    env = environment(os.environ, 1, True)
    script = QUEUE.replace("LOST", str(lost))
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["begins", *map(str, range(20))]

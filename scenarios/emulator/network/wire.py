"""The wire: one process that carries packets between the hosts' TUN devices with rates, delays and losses.

Each packet passes the uplink of its sender (a rate and a queue with tail drop), then the path (a delay and a loss),
then the downlink of its receiver (a rate and a queue). Packets enter a downlink in the order of their arrival times, so
a far host never makes a near one wait. The loop is compiled. The process is also the guard: when the driver has ended
for any reason, it kills every process that still runs on the hosts.

    python -m scenarios.emulator.network.wire SETTINGS        (started by `Network`)
"""

import json
import os
import sys
from typing import Any, Final

import numpy as np
from numba import njit, typeof, types

from scenarios.emulator.network import shared as shm
from scenarios.emulator.network.namespace import end_processes
from scenarios.emulator.network.packets import HEAD_BYTES, TABLE_ROWS, inbound, outbound, segments, wire_bytes
from scenarios.emulator.network.shared import Shared

__all__ = ["main"]

_MAX_PACKETS: Final = 1 << 18
"""Packets in flight at once; one more is dropped and counted as if its queue were full."""
_PACKET_BYTES: Final = 65_536 + HEAD_BYTES
_READS: Final = 32
"""Packets read from one host before the next host's turn."""
_TICK_NS: Final = 500_000
"""The shortest sleep. Packets arrive up to this late, several at a time."""
_IDLE_NS: Final = 1_000_000_000
_POLLIN: Final = 1 << 32  # in a struct pollfd read as one number
_REVENTS: Final = 48
_DUE, _SERIAL, _ARRIVING, _POINTER, _LENGTH, _RECEIVER, _WIRE_BYTES, _COLUMNS = range(8)
_PRIORITY: Final = -15

_read = types.ExternalFunction("read", types.int64(types.int32, types.uintp, types.uintp))
_write = types.ExternalFunction("write", types.int64(types.int32, types.uintp, types.uintp))
_malloc = types.ExternalFunction("malloc", types.uintp(types.uintp))
_free = types.ExternalFunction("free", types.void(types.uintp))
_memcpy = types.ExternalFunction("memcpy", types.uintp(types.uintp, types.uintp, types.uintp))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.uintp))
_ppoll = types.ExternalFunction("ppoll", types.int32(types.uintp, types.uintp, types.uintp, types.uintp))


@njit(cache=True)
def _now(timespec):
    _clock_gettime(np.int32(1), timespec.ctypes.data)  # CLOCK_MONOTONIC
    return timespec[0] * 1_000_000_000 + timespec[1]


@njit(cache=True)
def _before(slots, one, other):
    if slots[one, _DUE] != slots[other, _DUE]:
        return slots[one, _DUE] < slots[other, _DUE]
    return slots[one, _SERIAL] < slots[other, _SERIAL]


@njit(cache=True)
def _push(heap, slots, count, slot):
    """Add a slot to a heap of `count`."""
    at = count
    while at:
        up = (at - 1) // 2
        if not _before(slots, slot, heap[up]):
            break
        heap[at] = heap[up]
        at = up
    heap[at] = slot


@njit(cache=True)
def _pop(heap, slots, count):
    """Remove and return the first slot of a heap of `count`."""
    first, last = heap[0], heap[count - 1]
    at, count = 0, count - 1
    while 2 * at + 1 < count:
        down = 2 * at + 1
        if down + 1 < count and _before(slots, heap[down + 1], heap[down]):
            down += 1
        if not _before(slots, heap[down], last):
            break
        heap[at] = heap[down]
        at = down
    heap[at] = last
    return first


@njit(cache=True)
def _through(free_ns, host, now, size, rate, queue_ns):
    """Return when `size` bytes have passed a link that serves one packet at a time; -1 when its queue is full."""
    if rate <= 0.0:
        return now
    start = max(now, free_ns[host])
    if start - now > queue_ns:
        return np.int64(-1)
    free_ns[host] = start + np.int64(size / rate)
    return free_ns[host]


@njit(cache=True)
def _take(packet, length, host, there, now, up_free, table, last_port, public, knobs, delays, counters, carried):
    """Send a packet from `host`: return when it reaches the downlink of `there`, or -1 when it is dropped."""
    if there < 0 or knobs[host, shm.CUT] != 0 or knobs[there, shm.CUT] != 0 or delays[host, there] < 0:
        return np.int64(-1)
    kind = np.int64(knobs[host, shm.FIREWALL])
    if kind and not outbound(packet, length, host, kind, public[host], table, last_port):
        counters[host, shm.REFUSED] += 1
        return np.int64(-1)
    size = wire_bytes(packet, length)
    out = _through(up_free, host, now, size, knobs[host, shm.UP_RATE], knobs[host, shm.UP_QUEUE_NS])
    if out < 0:
        counters[host, shm.QUEUE_DROPS] += 1
        return np.int64(-1)
    count, _ = segments(packet, length)
    counters[host, shm.SENT_BYTES] += size
    counters[host, shm.SENT_PACKETS] += count
    carried[host, there] += size
    kept = (1.0 - knobs[host, shm.LOSS]) * (1.0 - knobs[there, shm.LOSS])
    if kept < 1.0 and np.random.random() >= kept**count:
        counters[host, shm.LOSSES] += 1
        return np.int64(-1)
    return out + delays[host, there]


@njit(cache=True)
def _give(fd, packet, pointer, length, host, table, inside, forwards, knobs, counters, size):
    """Pass a packet that left the downlink of `host` through its firewall and into its TUN device."""
    kind = np.int64(knobs[host, shm.FIREWALL])
    if kind:
        _memcpy(packet.ctypes.data, pointer, np.uintp(length))
        if not inbound(packet, length, host, kind, inside[host], table, forwards):
            counters[host, shm.REFUSED] += 1
            return
        pointer = np.uintp(packet.ctypes.data)
    _write(fd, pointer, np.uintp(length))
    counters[host, shm.RECEIVED_BYTES] += size


@njit(cache=True)
def _deliver(now, count, slots, heap, spare, down_free, fds, packet, table, inside, forwards, knobs, counters):
    """Move every packet that is due one stage on; return how many packets are still in flight."""
    while count and slots[heap[0], _DUE] <= now:
        slot = _pop(heap, slots, count)
        count -= 1
        host, size = slots[slot, _RECEIVER], slots[slot, _WIRE_BYTES]
        if slots[slot, _ARRIVING]:
            rate, queue_ns = knobs[host, shm.DOWN_RATE], knobs[host, shm.DOWN_QUEUE_NS]
            done = _through(down_free, host, slots[slot, _DUE], size, rate, queue_ns)
            if done >= 0:
                slots[slot, _DUE], slots[slot, _ARRIVING] = done, 0
                _push(heap, slots, count, slot)
                count += 1
                continue
            counters[host, shm.QUEUE_DROPS] += 1
        else:
            pointer, length = np.uintp(slots[slot, _POINTER]), slots[slot, _LENGTH]
            _give(fds[host], packet, pointer, length, host, table, inside, forwards, knobs, counters, size)
        _free(np.uintp(slots[slot, _POINTER]))
        spare[_MAX_PACKETS - 1 - count] = slot
    return count


@njit(cache=True)
def _hold(packet, length, due, serial, there, count, slots, heap, spare):
    """Queue a copy of a packet until it reaches the downlink of `there` at time `due` (ns)."""
    slot = spare[_MAX_PACKETS - 1 - count]
    pointer = _malloc(np.uintp(length))
    _memcpy(pointer, packet.ctypes.data, np.uintp(length))
    slots[slot, _DUE], slots[slot, _SERIAL], slots[slot, _ARRIVING] = due, serial, 1
    slots[slot, _POINTER], slots[slot, _LENGTH] = np.int64(pointer), length
    slots[slot, _RECEIVER], slots[slot, _WIRE_BYTES] = there, wire_bytes(packet, length)
    _push(heap, slots, count, slot)


@njit(cache=True)
def _wait(fds, guard_fd, polls, timespec, wait_ns):
    """Sleep until a host has packets, which its entry of `polls` shows, or `wait_ns` pass. False: the guard closed."""
    for host in range(len(fds)):
        polls[host] = np.int64(fds[host]) | _POLLIN
    polls[-1] = np.int64(guard_fd) | _POLLIN
    timespec[0], timespec[1] = wait_ns // 1_000_000_000, wait_ns % 1_000_000_000
    if _ppoll(polls.ctypes.data, np.uintp(len(polls)), timespec.ctypes.data, np.uintp(0)) <= 0:
        polls[:] = 0
    return not polls[-1] >> _REVENTS


@njit(cache=True)
def _carry(fds, guard_fd, host_of, public, inside, forwards, knobs, delays, counters, carried, seed):
    """Carry packets until `guard_fd` becomes readable or its other end is closed.

    `host_of` (int64 [65536]): maps the last two bytes of an address to a host, or -1. `public` and `inside` (int64
    [hosts]): the outside and inside address of each host.
    """
    np.random.seed(seed)
    hosts = len(fds)
    polls = np.zeros(hosts + 1, np.int64)
    timespec, packet = np.zeros(2, np.int64), np.zeros(_PACKET_BYTES, np.uint8)
    table, last_port = np.zeros((TABLE_ROWS, 3), np.uint64), np.full(1, 20_000, np.int64)
    slots, heap = np.zeros((_MAX_PACKETS, _COLUMNS), np.int64), np.zeros(_MAX_PACKETS, np.int64)
    spare = np.arange(_MAX_PACKETS)
    up_free, down_free = np.zeros(hosts, np.int64), np.zeros(hosts, np.int64)
    count, serial = 0, np.int64(0)
    while True:
        now = _now(timespec)
        count = _deliver(
            now, count, slots, heap, spare, down_free, fds, packet, table, inside, forwards, knobs, counters
        )
        wait_ns = max(_TICK_NS, slots[heap[0], _DUE] - now) if count else _IDLE_NS
        if not _wait(fds, guard_fd, polls, timespec, wait_ns):
            return
        for host in range(hosts):
            reads = _READS if polls[host] >> _REVENTS else 0
            while reads:
                length = _read(fds[host], packet.ctypes.data, np.uintp(_PACKET_BYTES))
                if length <= 0:
                    break
                reads -= 1
                if length < HEAD_BYTES + 20 or packet[HEAD_BYTES] >> 4 != 4:
                    continue
                there = host_of[(np.int64(packet[HEAD_BYTES + 18]) << 8) | np.int64(packet[HEAD_BYTES + 19])]
                now = _now(timespec)
                due = _take(
                    packet,
                    length,
                    host,
                    there,
                    now,
                    up_free,
                    table,
                    last_port,
                    public,
                    knobs,
                    delays,
                    counters,
                    carried,
                )
                if due >= 0 and count == _MAX_PACKETS:
                    counters[host, shm.QUEUE_DROPS] += 1
                elif due >= 0:
                    serial += 1
                    _hold(packet, length, due, serial, there, count, slots, heap, spare)
                    count += 1


def _address(text: str) -> int:
    return int.from_bytes(bytes(map(int, text.split("."))), "big")


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)  # waiting for a core would delay packets
    hosts = settings["hosts"]
    shared = Shared(len(hosts), settings["shared_fd"])
    host_of = np.full(65_536, -1, np.int64)
    for index, host in enumerate(hosts):
        host_of[_address(host["address"]) & 0xFFFF] = index
    forwards = [(index, *pair) for index, host in enumerate(hosts) for pair in host["forward"]]
    arguments = (
        np.array([host["fd"] for host in hosts], np.int32),
        np.int32(settings["guard_fd"]),
        host_of,
        np.array([_address(host["address"]) for host in hosts], np.int64),
        np.array([_address(host["inside"]) for host in hosts], np.int64),
        np.array(forwards, np.int64).reshape(-1, 3),
        shared.knobs,
        shared.delays_ns,
        shared.counters,
        shared.carried,
    )
    _carry.compile(tuple(typeof(value) for value in (*arguments, 0)))
    print("ready", flush=True)
    _carry(*arguments, settings["seed"])
    end_processes(settings["namespaces"])


if __name__ == "__main__":
    main()

"""Packet parsing and rewriting for the wire: addresses, ports, checksums, flows, NAT. Compiled: it runs per packet.

A packet is a `virtio_net_hdr` (10 bytes, by which the kernel says what it left to offload) followed by IPv4. A large
TCP segment stays whole (TSO), and its checksum is usually unfinished: the field then holds the sum over TCP's
pseudo-header only, not complemented.
"""

from typing import Final

import numpy as np
from numba import njit

from scenarios.emulator.network import shared as shm

__all__ = ["HEAD_BYTES", "TABLE_ROWS", "inbound", "outbound", "segments", "wire_bytes"]

HEAD_BYTES: Final = 10
_NEEDS_CHECKSUM: Final = 1
_TCP, _UDP = 6, 17
TABLE_ROWS: Final = 1 << 16
"""Rows of the flow table of a network; each flow takes two. A table is uint64 [TABLE_ROWS, 3]: a key of two words
(0, 0: free) and the translated port."""


@njit(cache=True)
def _u16(packet, at):
    return (np.int64(packet[at]) << 8) | np.int64(packet[at + 1])


@njit(cache=True)
def _put16(packet, at, value):
    packet[at] = (value >> 8) & 0xFF
    packet[at + 1] = value & 0xFF


@njit(cache=True)
def _u32(packet, at):
    return (_u16(packet, at) << 16) | _u16(packet, at + 2)


@njit(cache=True)
def _replaced(total, old, new):
    """Update a one's complement sum of 16-bit words in which the word `old` becomes `new` (RFC 1624)."""
    total = total + (~old & 0xFFFF) + new
    total = (total & 0xFFFF) + (total >> 16)
    return (total & 0xFFFF) + (total >> 16)


@njit(cache=True)
def segments(packet, length):
    """Return how many packets this is on a real link, and the header bytes of each (0 for a single packet)."""
    segment = np.int64(packet[4]) | (np.int64(packet[5]) << 8)  # in the machine's byte order
    if packet[1] == 0 or segment == 0:
        return np.int64(1), np.int64(0)
    at = HEAD_BYTES + 4 * (np.int64(packet[HEAD_BYTES]) & 15)
    header = at - HEAD_BYTES + 4 * (np.int64(packet[at + 12]) >> 4)
    payload = length - HEAD_BYTES - header
    return max(np.int64(1), (payload + segment - 1) // segment), header


@njit(cache=True)
def wire_bytes(packet, length):
    """Return the IP bytes of the packet on a real link, the headers of all its segments included."""
    count, header = segments(packet, length)
    return length - HEAD_BYTES + (count - 1) * header


@njit(cache=True)
def _transport_at(packet, length):
    """Return the offset of the TCP or UDP header, or 0 for another protocol."""
    at = HEAD_BYTES + 4 * (np.int64(packet[HEAD_BYTES]) & 15)
    protocol = packet[HEAD_BYTES + 9]
    if (protocol != _TCP and protocol != _UDP) or length < at + 8:
        return np.int64(0)
    return at


@njit(cache=True)
def _readdress(packet, at, address_at, address, port_at, port):
    """Write an address and a port, and correct the IP and transport checksums."""
    protocol = packet[HEAD_BYTES + 9]
    sum_at = at + (16 if protocol == _TCP else 6)
    partial = packet[0] & _NEEDS_CHECKSUM
    absent = protocol == _UDP and not partial and _u16(packet, sum_at) == 0
    ip_sum = ~_u16(packet, HEAD_BYTES + 10) & 0xFFFF
    sum_ = _u16(packet, sum_at) if partial else ~_u16(packet, sum_at) & 0xFFFF
    for word in range(2):
        old, new = _u16(packet, address_at + 2 * word), (address >> (16 - 16 * word)) & 0xFFFF
        ip_sum = _replaced(ip_sum, old, new)
        sum_ = _replaced(sum_, old, new)
        _put16(packet, address_at + 2 * word, new)
    if not partial:  # an unfinished sum does not cover the ports yet
        sum_ = _replaced(sum_, _u16(packet, port_at), port)
    _put16(packet, port_at, port)
    _put16(packet, HEAD_BYTES + 10, ~ip_sum & 0xFFFF)
    if not absent:
        _put16(packet, sum_at, sum_ if partial else ~sum_ & 0xFFFF)


@njit(cache=True)
def _place(table, a, b):
    """Return the row of a key, or the free row where it belongs; -1 when the table is full."""
    mixed = (a * np.uint64(0x9E3779B97F4A7C15)) ^ (b * np.uint64(0xC2B2AE3D27D4EB4F))
    row = np.int64((mixed >> np.uint64(40)) & np.uint64(TABLE_ROWS - 1))
    for _ in range(TABLE_ROWS):
        if (table[row, 0] == a and table[row, 1] == b) or (table[row, 0] == 0 and table[row, 1] == 0):
            return row
        row = (row + 1) & (TABLE_ROWS - 1)
    return np.int64(-1)


@njit(cache=True)
def _key(host, outward, protocol, port, far_address, far_port):
    a = (np.uint64(host + 1) << np.uint64(32)) | (np.uint64(outward) << np.uint64(24)) | np.uint64(protocol)
    a = (a << np.uint64(16)) | np.uint64(port)
    b = (np.uint64(far_address) << np.uint64(16)) | np.uint64(far_port)
    return a, b


@njit(cache=True)
def _remember(table, host, protocol, inside, outside, far_address, far_port):
    """Enter a flow in both directions; False when the table is full."""
    for outward in range(2):
        a, b = _key(host, outward, protocol, inside if outward else outside, far_address, far_port)
        row = _place(table, a, b)
        if row < 0:
            return False
        table[row, 0], table[row, 1], table[row, 2] = a, b, outside if outward else inside
    return True


@njit(cache=True)
def outbound(packet, length, host, kind, public, table, last_port):
    """Enter the flow of a packet that leaves a firewalled host, and rewrite its source. False: drop the packet.

    `last_port` (int64 [1]): the outside port assigned last, for SYMMETRIC.
    """
    at = _transport_at(packet, length)
    if not at:
        return False
    protocol, port = packet[HEAD_BYTES + 9], _u16(packet, at)
    far_address, far_port = _u32(packet, HEAD_BYTES + 16), _u16(packet, at + 2)
    a, b = _key(host, 1, protocol, port, far_address, far_port)
    row = _place(table, a, b)
    if row < 0:
        return False
    if table[row, 0] == 0:
        outside = port
        if kind == shm.SYMMETRIC:
            last_port[0] = outside = 20_000 + (last_port[0] - 20_000 + 1) % 40_000
        if not _remember(table, host, protocol, port, outside, far_address, far_port):
            return False
    else:
        outside = np.int64(table[row, 2])
    if kind >= shm.NAT:
        _readdress(packet, at, HEAD_BYTES + 12, public, at, outside)
    return True


@njit(cache=True)
def inbound(packet, length, host, kind, inside_address, table, forwards):
    """Admit a packet to a firewalled host and rewrite its destination. False: drop the packet.

    `forwards` (int64 [n, 3]): rows of (host, outside port, inside port) that are open to every sender.
    """
    at = _transport_at(packet, length)
    if not at:
        return False
    protocol, port = packet[HEAD_BYTES + 9], _u16(packet, at + 2)
    far_address, far_port = _u32(packet, HEAD_BYTES + 12), _u16(packet, at)
    a, b = _key(host, 0, protocol, port, far_address, far_port)
    row = _place(table, a, b)
    if row < 0:
        return False
    if table[row, 0] != 0:
        inside = np.int64(table[row, 2])
    else:
        inside = np.int64(-1)
        for row_at in range(len(forwards)):
            if forwards[row_at, 0] == host and forwards[row_at, 1] == port:
                inside = forwards[row_at, 2]
        if inside < 0 or not _remember(table, host, protocol, inside, port, far_address, far_port):
            return False
    if kind >= shm.NAT or inside != port:
        _readdress(packet, at, HEAD_BYTES + 16, inside_address, at + 2, inside)
    return True

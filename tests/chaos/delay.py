"""Holds packets back: what an xtables rule puts into a queue of netfilter goes on after a while, each in its turn.

    python -m tests.chaos.delay QUEUE SECONDS

Says "ready" once it has the queue; ends, and lets go what it holds, when its stdin ends. Constants and structures are
those of linux/netfilter/nfnetlink.h and nfnetlink_queue.h.
"""

import collections
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator

STDIN = 0
NETLINK_NETFILTER = 12
SUBSYSTEM = 3 << 8
PACKET, VERDICT, CONFIG = SUBSYSTEM | 0, SUBSYSTEM | 1, SUBSYSTEM | 2
REQUEST = 1
CFG_CMD, CFG_PARAMS = 1, 2
BIND, COPY_META = 1, 1
PACKET_HDR, VERDICT_HDR = 1, 2
NF_ACCEPT = 1
_HEADER = struct.Struct("=IHHII")
_FAMILY = struct.Struct(">BBH")
_ATTRIBUTE = struct.Struct("=HH")


class Queue:
    """One queue of netfilter, in this network namespace."""

    def __init__(self, number: int) -> None:
        """Raises OSError where it cannot be had."""
        self._number = number
        self.sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        self.sock.bind((0, 0))
        self._send(CONFIG, CFG_CMD, struct.pack(">BxH", BIND, 0))
        self._send(CONFIG, CFG_PARAMS, struct.pack(">IB", 0, COPY_META))

    def arrived(self) -> Iterator[int]:
        """Ids of packets that wait in it; blocks until there is a message."""
        data = self.sock.recv(1 << 16)
        while len(data) >= _HEADER.size:
            size, kind, *_ = _HEADER.unpack_from(data)
            if kind == PACKET:
                yield _packet_id(data[_HEADER.size + _FAMILY.size : size])
            data = data[(size + 3) & ~3 :]

    def accept(self, packet: int) -> None:
        self._send(VERDICT, VERDICT_HDR, struct.pack(">II", NF_ACCEPT, packet))

    def _send(self, kind: int, attribute: int, value: bytes) -> None:
        padded = value + bytes(-len(value) % 4)
        body = _FAMILY.pack(0, 0, self._number) + _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), attribute) + padded
        self.sock.send(_HEADER.pack(_HEADER.size + len(body), kind, REQUEST, 0, 0) + body)


def _packet_id(attributes: bytes) -> int:
    while attributes:
        size, kind = _ATTRIBUTE.unpack_from(attributes)
        if kind == PACKET_HDR:
            (found,) = struct.unpack_from(">I", attributes, _ATTRIBUTE.size)
            return int(found)
        attributes = attributes[(size + 3) & ~3 :]
    raise ValueError("a packet without an id")


def hold_back(queue: Queue, seconds: float) -> None:
    """Until stdin ends."""
    held: collections.deque[tuple[float, int]] = collections.deque()
    ended = False
    while held or not ended:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        waiting = queue.sock.fileno()
        ready, _, _ = select.select([waiting] if ended else [waiting, STDIN], [], [], wait)
        if STDIN in ready and not os.read(STDIN, 4096):
            ended, held = True, collections.deque((0.0, packet) for _, packet in held)
        if waiting in ready:
            held += [(time.monotonic() + seconds, packet) for packet in queue.arrived()]
        while held and held[0][0] <= time.monotonic():
            queue.accept(held.popleft()[1])


if __name__ == "__main__":
    found = Queue(int(sys.argv[1]))
    print("ready", flush=True)
    hold_back(found, float(sys.argv[2]))

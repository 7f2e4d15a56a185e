"""The requests of the supervisor (protocol.py): check every field, then call the keeper."""

import contextlib
import os
import re
import socket
import struct
from collections.abc import Callable
from typing import Any

from supervisor.keeper import kernel, term
from supervisor.keeper.core import Keeper
from supervisor.keeper.locks import Lock
from supervisor.keeper.loop import Loop, log
from supervisor.keeper.packets import Connection, Packet
from supervisor.keeper.places import JOBS
from supervisor.keeper.protocol import LOOK, MAIN, SIDECAR, VERSION
from supervisor.keeper.services import Service, check_signal
from supervisor.keeper.spawn import Order

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_UNIT = re.compile(f"({SIDECAR}|{LOOK})[A-Za-z0-9][A-Za-z0-9_.-]{{0,63}}")


class _Refused(Exception):  # noqa: N818 - becomes an answer, never an error of ours
    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.error = error


class Control:
    """The control socket: one supervisor, the newest connection."""

    def __init__(self, keeper: Keeper, loop: Loop, listener: socket.socket, memory: str | None) -> None:
        self._keeper = keeper
        self._loop = loop
        self._listener = listener
        self._memory = memory
        self._peer: Connection | None = None
        keeper.tell = self.tell
        loop.add(listener.fileno(), self._accept)
        self._ops: dict[str, Callable[[Packet, list[int], Any], None]] = {
            "hello": self._hello,
            "arm": self._arm,
            "locks": self._locks,
            "describe": self._describe,
            "start": self._start,
            "signal": self._signal,
            "kill": self._kill,
            "release": self._release,
            "remove": self._remove,
            "end": self._end,
            "quit": self._quit,
        }

    def tell(self, name: str, **fields: Any) -> None:
        """An event."""
        if self._peer is not None:
            self._peer.send({"event": name, **fields})

    def _accept(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            sock, _address = self._listener.accept()
            _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid not in (0, os.geteuid()):
                log(f"control connection of uid {uid} refused")
                sock.close()
                return
            older, self._peer = self._peer, Connection(sock, self._loop, self._packet, self._closed)
            if older is not None:
                older.close()

    def _closed(self, connection: Connection) -> None:
        """The supervisor is gone: nothing changes, the timer goes on."""
        if connection is self._peer:
            self._peer = None

    def _packet(self, connection: Connection, packet: Packet | None, fds: list[int]) -> None:
        number = None if packet is None else packet.get("id")

        def reply(error: str | None, message: str = "", **fields: Any) -> None:
            head = {"id": number, "ok": True} if error is None else _error(number, error, message)
            connection.send({**head, **fields})

        op = None if packet is None else packet.get("op")
        if packet is None or not isinstance(op, str) or op not in self._ops:
            reply("malformed", "expected a JSON object with id and op: " + ", ".join(self._ops))
            return
        try:
            self._ops[op](packet, fds, reply)
        except _Refused as refused:
            reply(refused.error, str(refused))
        except (OSError, ValueError) as error:
            reply("failed", f"{op}: {error}")
        except Exception as error:  # noqa: BLE001 - one bad request must not take the others along
            log(f"{op}: {error!r}")
            reply("failed", f"{op}: {error!r}")

    # --- requests -----------------------------------------------------------------------------------------------

    def _hello(self, packet: Packet, fds: list[int], reply: Any) -> None:
        keeper = self._keeper
        armed = keeper.ledger.term
        shown = None if armed is None else {"token": armed.token, "deadline_ns": armed.deadline_ns}
        reply(
            None,
            version=VERSION,
            pid=os.getpid(),
            containment=keeper.places.kind,
            parent=keeper.places.parent,
            armed=shown,
            ending=armed is not None and armed.ending,
            over=keeper.ledger.over,
            services={name: service.summary() for name, service in keeper.services.all.items()},
            locks=sorted(keeper.locks),
            held=[
                {"gpu": gpu, "holder": lock.holder, "since_ns": lock.taken_ns}
                for gpu, lock in sorted(keeper.locks.items())
                if lock.holder is not None
            ],
            leftover=keeper.left_over(),
            rss_bytes=kernel.rss_bytes(),
            tick_s=self._loop.tick.value_s(kernel.boot_ns()),
            kill_s=keeper.kill_time.value_s(kernel.boot_ns()),
            hardware=keeper.hardware_state,
            memory_locked=self._memory is None,
            memory_not_locked_because=self._memory,
        )

    def _arm(self, packet: Packet, fds: list[int], reply: Any) -> None:
        token, deadline_ns = _int(packet, "token", 1), _int(packet, "deadline_ns", 0)
        refusal = self._keeper.arm(token, deadline_ns)
        if refusal is not None:
            raise _Refused(*refusal)
        reply(None, token=token, deadline_ns=deadline_ns)

    def _admitted(self, packet: Packet) -> int:
        token = _int(packet, "token", 1)
        refusal = term.admit(self._keeper.ledger, token, kernel.boot_ns())
        if refusal is not None:
            raise _Refused(*refusal)
        return token

    def _locks(self, packet: Packet, fds: list[int], reply: Any) -> None:
        self._admitted(packet)
        entries = packet.get("locks")
        if not isinstance(entries, list) or len(entries) != len(fds):
            raise _Refused("malformed", "locks: expected a list with one fd per entry")
        new = [(_int(entry, "gpu", 0), _str(entry, "path")) for entry in map(_object, entries)]
        known = self._keeper.locks
        for (gpu, path), fd in zip(new, fds, strict=True):
            lock = Lock(gpu, path, os.dup(fd))
            old = known.get(gpu)
            if old is not None and old.inode != lock.inode and old.holder is not None:
                lock.close()
                raise _Refused("held", f"GPU {gpu}: its lock is held on another inode")
            if old is not None and old.inode == lock.inode:
                lock.close()
                old.reread()
                continue
            if old is not None:
                old.close()
            known[gpu] = lock
        self._keeper.remember()
        reply(None)

    def _describe(self, packet: Packet, fds: list[int], reply: Any) -> None:
        lock = self._keeper.locks.get(_int(packet, "gpu", 0))
        if lock is None:
            raise _Refused("no-such-gpu", f"no lock file was given for GPU {packet['gpu']}")
        reply(None, foreign=lock.restore())

    def _start(self, packet: Packet, fds: list[int], reply: Any) -> None:
        self._admitted(packet)
        name = _str(packet, "service")
        if not _NAME.fullmatch(name) or name == JOBS:
            raise _Refused("malformed", f"service: {name!r} cannot be the name of a service")
        order = _order(packet)
        lock = None
        if packet.get("lock") is not None:
            lock = self._keeper.locks.get(_int(packet, "lock", 0))
            if lock is None:
                raise _Refused("no-such-gpu", f"no lock file was given for GPU {packet['lock']}")
        if self._keeper.place is None:
            raise _Refused("no-term", "no term is armed")
        self._keeper.services.start(self._keeper.place, name, _unit(packet), order, lock, reply)

    def _service(self, packet: Packet) -> Service:
        name = _str(packet, "service")
        service = self._keeper.services.all.get(name)
        if service is None:
            raise _Refused("no-such-service", f"no service {name!r} here")
        return service

    def _signal(self, packet: Packet, fds: list[int], reply: Any) -> None:
        signum = check_signal(packet.get("signal"))
        unit = packet.get("unit") if packet.get("unit") == MAIN else _unit(packet)
        reply(None, signalled=self._keeper.services.signal(self._service(packet), unit, signum))

    def _kill(self, packet: Packet, fds: list[int], reply: Any) -> None:
        service, unit = self._service(packet), _unit(packet)
        self._keeper.services.kill(service, unit)
        if unit is None:
            self._keeper.jobs.kill(service.name)
        reply(None)

    def _release(self, packet: Packet, fds: list[int], reply: Any) -> None:
        self._keeper.services.release(self._service(packet))
        reply(None)

    def _remove(self, packet: Packet, fds: list[int], reply: Any) -> None:
        service = self._service(packet)
        if service.running or service.occupied:
            raise _Refused("not-empty", f"{service.name} still has processes")
        self._keeper.services.remove(service)
        reply(None)

    def _end(self, packet: Packet, fds: list[int], reply: Any) -> None:
        self._keeper.begin_end(_int(packet, "token", 1), _int(packet, "by_ns", 0), reply)

    def _quit(self, packet: Packet, fds: list[int], reply: Any) -> None:
        if self._keeper.ledger.term is not None:
            raise _Refused("armed", "a term is armed: end it first")
        self._keeper.stopped = True
        reply(None)


def _error(number: object, error: str, message: str) -> Packet:
    return {"id": number, "ok": False, "error": error, "message": message}


def _object(value: object) -> Packet:
    if not isinstance(value, dict):
        raise _Refused("malformed", f"expected an object, got {value!r:.80}")
    return value


def _int(packet: Packet, key: str, least: int) -> int:
    value = packet.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise _Refused("malformed", f"{key}: expected an integer from {least} on, got {value!r:.80}")
    return value


def _str(packet: Packet, key: str) -> str:
    value = packet.get(key)
    if not isinstance(value, str) or not value or "\0" in value:
        raise _Refused("malformed", f"{key}: expected a string, got {value!r:.80}")
    return value


def _unit(packet: Packet) -> str | None:
    unit = packet.get("unit")
    if unit is not None and not (isinstance(unit, str) and _UNIT.fullmatch(unit)):
        raise _Refused("malformed", f"unit: expected side-NAME or look-NAME, got {unit!r:.80}")
    return unit


def _order(packet: Packet) -> Order:
    argv, env, groups = packet.get("argv"), packet.get("env"), packet.get("groups", [])
    if not isinstance(argv, list) or not argv or not all(_is_text(item) for item in argv) or not argv[0]:
        raise _Refused("malformed", "argv: expected a list of strings, the first not empty")
    if not isinstance(env, dict) or not all(_is_text(v) and k and "=" not in k + "" for k, v in env.items()):
        raise _Refused("malformed", "env: expected an object of strings")
    if not isinstance(groups, list):
        raise _Refused("malformed", "groups: expected a list of numbers")
    ids = {"groups": groups}
    return Order(
        argv=argv,
        env=env,
        cwd=_str(packet, "cwd"),
        uid=None if packet.get("uid") is None else _int(packet, "uid", 0),
        gid=None if packet.get("gid") is None else _int(packet, "gid", 0),
        groups=[_int({"groups": group}, "groups", 0) for group in ids["groups"]],
        log=None if packet.get("log") is None else _str(packet, "log"),
        log_gid=None if packet.get("log_gid") is None else _int(packet, "log_gid", 0),
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value

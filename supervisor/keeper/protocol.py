"""What supervisor, keeper and jobs say to each other: one JSON object per SOCK_SEQPACKET packet.

`<run>/keeper-control.sock` (0600; the peer must have the keeper's uid or be root): requests of the one supervisor, with
`op` and `id`; each is answered by one packet with the same `id` and `ok`, an error with `ok: false, error, message`.
Packets without `id` are events, named by `event`. The newest connection is the supervisor; an older one is closed. A
supervisor that leaves more than 4096 packets unread loses its connection, and asks `hello` when it comes back.
Besides the errors named below: `malformed` (a field is wrong), `failed` (the kernel said no; message has it).

Requests (times are absolute CLOCK_BOOTTIME nanoseconds; the keeper never sees a duration that it would have to keep):

    hello   {}                      → {version, pid, containment: cgroup | process-group,
                                      armed: {token, deadline_ns} | null, ending: bool, over, locks: [gpu],
                                      held: [{gpu, holder, since_ns}],
                                      leftover: [token], tick_s, kill_s (the slowest of the last minutes: pace.py),
                                      rss_bytes, memory_locked, memory_not_locked_because,
                                      hardware: {device, timeout_s, error: str | null} | null (the machine's watchdog),
                                      services: {name: {pid, start_ticks, cgroup, running, empty, lock, since_ns,
                                      status, ready, units: {unit: {pid, start_ticks, running, status, ready}}}}}
                                      pid 0: not known; status: how it ended, as wait(2) gives it; ready: it has said
                                      READY=1; units: its sidecars
    arm     {token, deadline_ns}    → {token, deadline_ns}  starts a term (makes its cgroup) or moves its deadline on.
                                      Refused: `over` (token ≤ the highest that is over), `other-term` (another is
                                      armed or ending), `deadline` (in the past, or before the present one),
                                      `unkillable` (processes of an earlier term still exist), `hardware` (a required
                                      watchdog of the machine cannot be used)
    locks   {token, locks: [{gpu, path}]} + one fd each (SCM_RIGHTS), of the lock files' inodes → {}
                                      Refused: as `start`; `held` (this GPU's lock is held on another inode)
    describe {gpu}                  → {foreign}  is what stands in the lock file what the keeper wrote last (or the
                                      supervisor, before `locks`)? If not: the first 80 bytes of it, and it is written
                                      again; else null. Refused: `no-such-gpu`
    start   {token, service, argv, env, cwd, uid, gid, groups, log, log_gid?, lock: gpu | null, unit?}
                                    → {pid, start_ticks, cgroup}  once exec has happened. A lock is fd 3 of the child;
                                      one that the service still has from before is kept. uid null: as the keeper.
                                      With `unit` one more process in the service's cgroup: `side-NAME`, a sidecar,
                                      which starts before the service (the lock is taken for the service, and not
                                      handed to it), or `look-NAME`, beside one that runs. Refused: `no-term`,
                                      `over`, `deadline`, `running` (+ pid; or it may not be started beside what
                                      runs), `busy` (+ holder if it is one of ours), `no-such-gpu`, `exec` (+ stage:
                                      clone, cgroup, session, log, user, parent, cwd, exec; + errno)
    signal  {service, signal, unit?}
                                    → {signalled}  every process of the service, or of one unit of it (`main`: its
                                      first process and what that started), each proven by pidfd and cgroup
    kill    {service, unit?}        → {}  cgroup.kill of the service, its jobs included; `empty` follows. With `unit`:
                                      of that one only
    release {service}               → {}  closes the keeper's duplicate of the service's lock
    remove  {service}               → {}  forgets an empty service and removes its cgroup; its lock is released.
                                      Refused: `not-empty`; as for the three above: `no-such-service`
    end     {token, by_ns}          → {clean, unkillable: [pid], pending, took_ms}  kills all of the term, waits until
                                      empty, removes the term's cgroup, counts the token as over (from the request on).
                                      At `by_ns` (100 ms after the kill at the
                                      earliest) what is left is frozen and named in `unkillable` (`pending`: SIGKILL is
                                      pending on all of it), its locks are kept, and the term is over all the same. A
                                      token that is over, or was never armed, is over by this at once.
    quit    {}                      → {}  and exits; refused (`armed`) while a term is armed

Events: `exited {service, unit, pid, status}` (unit null: its first process; a wait status; null: lost) ·
`empty {service}`, after `exited` ·
`lock-taken {gpu, holder, since_ns}` (again, with its new process, for a lock that is kept through a restart) ·
`lock-free {gpu}` (the keeper's duplicate is closed; a process may still hold it) ·
`notify {service, unit, pid, main, fields}` (what a process said by sd_notify; `main`: the service's first one) ·
`notify-lost {}` (so many came at once that some of them may have been dropped) ·
`fired {token, clean, unkillable, pending, took_ms}` (the switch: the deadline passed) · `cleared {token}` (the last
unkillable process of a term that is over has gone). When a term ends its services are forgotten without further events.

`<run>/keeper.sock` (0660 root:gpuward): jobs of `gpuward lock run` and `gpu_lock`.

    enter   {gpu, command, mode: exec | scope}
                                    → {ok: true, token, gpu} + the lock's fd, flocked; the caller now stands in a fenced
                                      cgroup of its own
                                    → {ok: false, reason: busy | no-authority, holder?: {service, pid, since, token}}
                                    → {ok: false, reason: no-such-gpu | malformed}
    leave   {gpu}                   → {ok: true}  in mode `scope`, on the connection that entered, which stays open
                                      until then (on a new one, where the keeper was replaced meanwhile): the keeper
                                      closes its duplicate. The caller stays fenced. Not said (exec, or a caller that
                                      dies): the duplicate is kept until the caller's box is empty.
"""

CONTROL_SOCKET = "keeper-control.sock"
JOB_SOCKET = "keeper.sock"
NOTIFY_SOCKET = "notify.sock"
"""0666, SOCK_DGRAM: sd_notify(3) (notify.py)."""
NOTIFY_FOLDER = "notify"
"""In the run folder: the notify socket once more, and nothing else, for mount namespaces."""
MAIN, SIDECAR, LOOK = "main", "side-", "look-"
"""Cgroups below a service's: of its first process, of a sidecar, of a look from inside."""
LOCKS_FILE = "locks.json"
"""In the run folder, written by the supervisor at its start: {"<gpu index>": {"path": …}}. By it `lock run --path FILE`
knows that FILE is the lock of a configured GPU."""
MAX_PACKET = 256 * 1024
"""Bytes. Larger start requests are refused by the sender; SO_SNDBUF is raised to twice this."""
VERSION = 1

"""What supervisor, keeper and jobs say to each other: one JSON object per SOCK_SEQPACKET packet.

`<run>/keeper-control.sock` (0600; the peer must have the keeper's uid or be root): requests of the one supervisor, with
`op` and `id`; each is answered by one packet with the same `id` and `ok`, an error with `ok: false, error, message`.
Packets without `id` are events. The newest connection is the supervisor; an older one is closed.

Requests (times are absolute CLOCK_BOOTTIME nanoseconds; the keeper never sees a duration that it would have to keep):

    hello   {}                      → {pid, containment, armed: {token, deadline_ns} | null, over, services, rss_bytes}
    arm     {token, deadline_ns}    → {token, deadline_ns}  starts a term (makes its cgroup) or moves its deadline on.
                                      Refused: `over` (token ≤ the highest that is over), `other-term` (another is
                                      armed), `deadline` (in the past, or before the present one)
    locks   {token, locks: [{gpu, path}]} + one fd each (SCM_RIGHTS), of the lock files' inodes → {}
    start   {token, service, argv, env, cwd, uid, gid, groups, log, lock: gpu | null}
                                    → {pid, start_ticks, cgroup}. Refused: `no-term`, `over`, `deadline`, `running`,
                                      `busy` (+ holder), `exec` (+ stage, errno)
    signal  {service, signal}       → {signalled}  every process of the service, each proven by pidfd and cgroup
    kill    {service}               → {}  cgroup.kill of the service, its jobs included; `empty` follows
    release {service}               → {}  closes the keeper's duplicate of the service's lock
    remove  {service}               → {}  forgets an empty service and removes its cgroup; its lock is released
    end     {token, by_ns}          → {clean, unkillable: [pid], took_ms}  kills all of the term, waits until empty, removes
                                      the term's cgroup, counts the token as over. At `by_ns` what has SIGKILL pending is
                                      frozen and named in `unkillable`, and the term is over all the same
    quit    {}                      → {}  and exits; refused while a term is armed

Events: `exited {service, pid, status}` (a wait status) · `empty {service}` · `lock-taken {gpu, holder}` ·
`lock-free {gpu}` · `fired {token, clean, unkillable, took_ms}` (the switch: the deadline passed).

`<run>/keeper.sock` (0660 root:gpuward): jobs of `gpuward lock run`. One request, one answer:

    enter   {gpu, command}          → {ok: true, token, gpu} + the lock's fd, flocked; the caller now stands in a fenced
                                      cgroup of its own
                                    → {ok: false, reason: busy | no-authority, holder?: {service, pid, since, token}}
                                    → {ok: false, reason: no-such-gpu}
"""

CONTROL_SOCKET = "keeper-control.sock"
JOB_SOCKET = "keeper.sock"
LOCKS_FILE = "locks.json"
"""In the run folder, written by the supervisor at its start: {"<gpu index>": {"path": …}}. By it `lock run --path FILE` knows
that FILE is the lock of a configured GPU."""
MAX_PACKET = 256 * 1024
"""Bytes. Larger start requests are refused by the sender; SO_SNDBUF is raised to twice this."""
VERSION = 1

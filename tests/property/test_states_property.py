"""Random walks over the state table together with the restart accounting: what always holds for a service."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from supervisor.service.restart import CLEAR, Backoff, Degrade, Policy, RestartNow, failed
from supervisor.service.states import ALIVE, State, step

POLICY = Policy()


KEEPS_LOCK = ALIVE | {State.STOPPING, State.QUARANTINED}
"""States in which a `lifetime` service keeps the GPU's lock: through kill, reset and restart at once."""


class ServiceLife(RuleBasedStateMachine):
    """A lifetime service: `locked` is its GPU's mutex, `process` its process tree."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State.STOPPED
        self.account = CLEAR
        self.now = 0.0
        self.next_at = 0.0
        self.locked = self.process = False
        self.degraded = False

    def to(self, new: State) -> None:
        assert step(self.state, new)
        self.state = new
        if new not in KEEPS_LOCK:
            self.locked = False

    @precondition(lambda self: self.state in {State.STOPPED, State.WAITING_LOCK, State.BACKOFF})
    @rule(free=st.booleans())
    def start(self, free: bool) -> None:
        if self.state is State.BACKOFF:
            self.now = max(self.now, self.next_at)
        self.to(State.STARTING)
        if free:
            self.locked = self.process = True
        else:
            self.to(State.WAITING_LOCK)

    @precondition(lambda self: self.state is State.STARTING and not self.process)
    @rule()
    def started_again_with_the_lock_kept(self) -> None:
        assert self.locked
        self.process = True

    @precondition(lambda self: self.state is State.STARTING and self.process)
    @rule()
    def ready(self) -> None:
        self.to(State.RUNNING)

    @precondition(lambda self: self.state in ALIVE)
    @rule(after=st.floats(0, 400), survives=st.booleans())
    def fails(self, after: float, survives: bool) -> None:
        self.now += after
        self.to(State.STOPPING)
        if survives:
            self.to(State.QUARANTINED)
            return
        self.process = False
        self.account, decision = failed(POLICY, self.account, was_ready=True, healthy_since=None, now=self.now)
        match decision:
            case RestartNow():
                self.to(State.STARTING)
            case Backoff(seconds):
                self.next_at = self.now + seconds
                self.to(State.BACKOFF)
            case Degrade():
                self.to(State.DEGRADED)

    @precondition(lambda self: self.state in ALIVE)
    @rule()
    def stopped(self) -> None:
        self.to(State.STOPPING)
        self.process = False
        self.to(State.STOPPED)

    @precondition(lambda self: self.state is State.QUARANTINED)
    @rule()
    def what_survived_is_gone(self) -> None:
        self.process = False
        self.to(State.STOPPED)

    @precondition(lambda self: self.state is State.DEGRADED)
    @rule()
    def reset(self) -> None:
        self.account = CLEAR
        self.to(State.STARTING)
        self.locked = True

    @invariant()
    def no_process_without_its_lock(self) -> None:
        assert self.locked or not self.process

    @invariant()
    def degraded_exactly_when_the_account_says_so(self) -> None:
        if self.state is State.DEGRADED:
            assert self.account.degraded
            assert not self.process

    @invariant()
    def a_pause_is_never_shorter_than_the_table_says(self) -> None:
        if self.state is State.BACKOFF:
            assert self.next_at - self.now >= 30 - 1e-6


TestServiceLife = ServiceLife.TestCase
TestServiceLife.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

"""A queue under test and the specification, side by side over the same random history.

After every event both must hold the same requests and offer the same one. What is read is the fake
engine's ledger, never the queue's own counters, so a wrong count cannot hide itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchjob_spec.queue import Request, Settings, State, blend_choices
from batchjob_testkit import strategies
from batchjob_testkit.factories import checked_of
from batchjob_testkit.fakes import FakeEngine, FakeRequest
from batchjob_testkit.history import History, Recorded, about, asked, said
from batchjob_testkit.queues import SpecQueue, WaitingQueue

QueueFactory = Callable[[FakeEngine, Settings, bool], WaitingQueue]
"""Makes an empty queue from an engine, the settings, and whether ``policy=priority`` holds."""

FACTORY_OF_A_QUEUE = "a FakeEngine, the Settings and a bool (policy=priority) that makes an empty queue"


class QueueLockstep(RuleBasedStateMachine):
    """Subclass it with ``make_queue``, the factory of the queue under test."""

    make_queue: QueueFactory

    def __init__(self) -> None:
        super().__init__()
        self._new_queue = checked_of(type(self), "make_queue", WaitingQueue, FACTORY_OF_A_QUEUE)
        self.waiting: list[FakeRequest] = []
        self.ended: list[FakeRequest] = []
        self.arrivals = 0

    @initialize(engine=strategies.engines(), settings=strategies.settings(), priority_policy=st.booleans())
    def start(self, engine: FakeEngine, settings: Settings, priority_policy: bool) -> None:
        """Both queues are empty, over the same engine."""
        self.engine = engine
        self.spec = SpecQueue(engine, settings, priority_policy=priority_policy)
        self.history = History("Q6: no event that the engine can produce makes the queue raise")
        self.queue: Any = Recorded(self._new_queue(engine, settings, priority_policy), self.history)
        policy = "policy=priority" if priority_policy else "policy=fcfs"
        self.history.note(f"a new queue over {about(engine)}, {settings}, {policy}")

    # --- events -----------------------------------------------------------------------------------

    @rule(data=st.data(), count=st.integers(1, 4))
    def add(self, data: st.DataObject, count: int) -> None:
        """Requests arrive."""
        for _ in range(count):
            request = data.draw(strategies.requests(f"r{self.arrivals}"))
            self.arrivals += 1
            self.waiting.append(request)
            since = len(self.history.events)
            self._both("add_request", request)
            self.history.sum_up(since, asked(request))

    @rule()
    def peek(self) -> None:
        """The engine looks at the next request and leaves it where it is."""
        if self.spec:
            self._compare_peeks()

    @rule(steps=st.integers(1, 6))
    def admit(self, steps: int) -> None:
        """The engine runs what is offered, until nothing is or it finds no room."""
        for _ in range(steps):
            if not self.spec:
                return
            request = self._take()
            started = self.engine.start(request)
            self.history.note(
                f"the engine {'runs' if started else 'finds no room for'} {request.request_id}", self.engine
            )
            if not started:
                self._both("refused", request.request_id)
                self._come_back([request])
                return

    @rule(count=st.integers(1, 4))
    def skip(self, count: int) -> None:
        """The engine takes requests that it cannot run in this step, and puts them all back."""
        skipped: list[FakeRequest] = []
        while self.spec and len(skipped) < count:
            skipped.append(self._take())
        if skipped:
            self._come_back(skipped)

    @precondition(lambda self: self.engine.running())
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        """Some running requests compute a step."""
        for request in self._draw_running(data):
            self.engine.step(request)
            self.history.note(
                f"{request.request_id} computes a step and has {request.num_tokens} tokens", self.engine
            )

    @precondition(lambda self: self.engine.running())
    @rule(data=st.data(), tokens=st.sampled_from([0, 8, 32]), times=st.integers(1, 3))
    def start_several(self, data: st.DataObject, tokens: int, times: int) -> None:
        """Requests of one job start and find a prefix of it in the cache."""
        request = data.draw(st.sampled_from(list(self.engine.running())))
        for _ in range(times):
            self._both("found_in_cache", request.request_id, tokens)

    @precondition(lambda self: self.engine.running())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Running requests are thrown out."""
        for request in self._draw_running(data):
            self.engine.preempt(request)
            self.history.note(f"the engine preempts {request.request_id}", self.engine)
            self.waiting.append(request)
            self._both("prepend_request", request)

    @precondition(lambda self: self.engine.running())
    @rule(data=st.data(), by_itself=st.booleans(), decoded=st.integers(0, 400))
    def finish(self, data: st.DataObject, by_itself: bool, decoded: int) -> None:
        """A running request stops, reaches its cap, is aborted or fails."""
        request = data.draw(st.sampled_from(list(self.engine.running())))
        if by_itself:
            request.num_output_tokens = min(decoded, request.max_tokens)
        self.engine.finish(request)
        self.history.note(
            f"{request.request_id} is over after {request.num_output_tokens} tokens", self.engine
        )
        self._end(request, by_itself)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), peeked=st.booleans(), reported=st.booleans())
    def remove(self, data: st.DataObject, peeked: bool, reported: bool) -> None:
        """A waiting request is aborted, perhaps the one just looked at."""
        request = data.draw(st.sampled_from(self.waiting))
        if peeked and self.spec:
            self._compare_peeks()
            request = self.spec.peek_request()
        self.waiting.remove(request)
        self._both("remove_requests", [request])
        if reported:
            self._end(request, by_itself=False)
        else:
            self.ended.append(request)
        if self.spec:
            self._come_back([self._take(peek_first=False)])

    @rule(data=st.data())
    def remove_absent(self, data: st.DataObject) -> None:
        """What is not in the queue is removed from it."""
        absent = data.draw(strategies.requests("absent"))
        self._both("remove_requests", [absent, *self.engine.running(), *self.ended])
        self._both("remove_request", absent)

    @precondition(lambda self: self.ended)
    @rule()
    def report(self) -> None:
        """The end of a request that was taken off the queue is reported."""
        self._end(self.ended.pop(), by_itself=False)

    @rule(num_blocks=st.integers(0, 60))
    def resize(self, num_blocks: int) -> None:
        """The pool shrinks or grows under the queue."""
        self.engine.withhold(num_blocks)
        self.history.note("the pool is resized", self.engine)

    # --- what must hold ---------------------------------------------------------------------------

    @invariant()
    def both_hold_the_same_requests(self) -> None:
        """Q1 and Q4: everything that waits is there once, and is counted."""
        if hasattr(self, "queue"):
            names = sorted(request.request_id for request in self.waiting)
            self._compare("Q4: len counts all that wait", len(self.queue), len(names))
            present = sorted(request.request_id for request in self.queue)
            self._compare("Q1: everything that waits is there once", present, names)

    @invariant()
    def both_offer_the_same_request(self) -> None:
        """O1 to O6, V1 to V4, E, J4, P1, P4 and Q2: the same choice, from the state as it is now."""
        if hasattr(self, "queue"):
            self._compare("Q4: bool says whether one may be admitted now", bool(self.queue), bool(self.spec))
            if self.spec:
                self._compare_peeks()

    @invariant()
    def both_wait_in_the_same_order(self) -> None:
        """Q5: the whole order is the same, not only its beginning."""
        if hasattr(self, "queue"):
            self._compare(
                "Q5: the whole order is the specification's",
                [request.request_id for request in self.queue],
                [request.request_id for request in self.spec],
            )

    @invariant()
    def both_name_the_same_as_unservable(self) -> None:
        """P2: the same requests can never fit."""
        if hasattr(self, "queue"):
            self._compare(
                "P2: what can never fit is named",
                sorted(request.request_id for request in self.queue.unservable()),
                sorted(request.request_id for request in self.spec.unservable()),
            )

    def teardown(self) -> None:
        """The engine's ledger is whole."""
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    # --- helpers ----------------------------------------------------------------------------------

    def _both(self, method: str, *args: Any) -> None:
        for queue in (self.queue, self.spec):
            getattr(queue, method)(*args)

    def _take(self, *, peek_first: bool = True) -> FakeRequest:
        if peek_first:
            self._compare_peeks()
        taken, expected = self.queue.pop_request(), self.spec.pop_request()
        self._compare("Q2: pop takes what peek showed, or the next one if that is gone", taken, expected)
        self.waiting.remove(expected)
        return expected

    def _come_back(self, requests: list[FakeRequest]) -> None:
        self.waiting += requests
        if len(requests) == 1:
            self._both("prepend_request", requests[0])
        else:
            self._both("prepend_requests", requests)

    def _end(self, request: FakeRequest, by_itself: bool) -> None:
        for queue in (self.queue, self.spec):
            queue.end(request.request_id, by_itself=by_itself)

    def _draw_running(self, data: st.DataObject) -> list[FakeRequest]:
        running = list(self.engine.running())
        return data.draw(st.lists(st.sampled_from(running), unique=True, max_size=4))

    def _compare_peeks(self) -> None:
        rule = "O0 to O6, V1 to V4, E, J4, P1, P4: the same request is offered"
        self._compare(rule, self.queue.peek_request(), self.spec.peek_request())

    def _compare(self, rule: str, observed: Any, expected: Any) -> None:
        if observed == expected:  # what follows takes time
            return
        self.history.check(
            observed,
            expected,
            rule,
            f"running: {said(list(self.engine.running()))}, "
            f"{self.engine.free_blocks()} of {self.engine.usable_blocks} blocks free",
            f"queue under test: {self._listed()}",
            f"specification:    {said(list(self.spec))}",
        )

    def _listed(self) -> str:
        try:
            return said(list(self.queue))
        except AssertionError as error:  # must not hide what is wrong already
            return str(error).splitlines()[1].strip()


class BlendLockstep(QueueLockstep):
    """The same with ``order: blend`` (O5b), which leaves free whose turn it is among the jobs.

    The specification follows the choice of the queue under test, and must find it among those that it allows.
    """

    @initialize(engine=strategies.engines(), settings=strategies.settings(), priority_policy=st.booleans())
    def start(self, engine: FakeEngine, settings: Settings, priority_policy: bool) -> None:
        """Both queues are empty, over the same engine."""
        super().start(engine, replace(settings, order="blend"), priority_policy)
        self.spec.choose = self._follow

    @invariant()
    def both_wait_in_the_same_order(self) -> None:
        """The order of the jobs is free."""

    def _take(self, *, peek_first: bool = True) -> FakeRequest:
        self.spec.peek_request()  # what is popped can be followed no more
        return super()._take(peek_first=peek_first)

    def _follow(self, state: State) -> Request | None:
        allowed = blend_choices(state)
        offered = self.queue.peek_request().request_id if self.queue else None
        if offered is None and (not allowed or state.running):
            return None
        names = [request.request_id for request in allowed]
        self._compare(f"O5b, P1: what is offered is one of {names}", offered in names, True)
        return next(request for request in allowed if request.request_id == offered)


def lockstep(factory: QueueFactory, machine: type[QueueLockstep] = QueueLockstep) -> type[QueueLockstep]:
    """The machine for one factory; give it to ``run_state_machine_as_test``."""
    return type(f"{machine.__name__}OfFactory", (machine,), {"make_queue": staticmethod(factory)})

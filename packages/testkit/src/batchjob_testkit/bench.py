"""A queue under test beside a fake engine, with the few moves that the contract makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchjob_spec.queue import Settings
from batchjob_testkit.fakes import FakeEngine, FakeRequest
from batchjob_testkit.history import History, Recorded, about, asked

BLOCK = 16
"""Tokens in a block of the bench's engine."""


class Bench:
    """A queue under test beside a fake engine. Every move is noted in its history."""

    def __init__(
        self,
        make_queue: Callable[[FakeEngine, Settings, bool], Any],
        history: History,
        *,
        usable_blocks: int = 1000,
        priority_policy: bool = False,
        **settings: Any,
    ) -> None:
        self.engine = FakeEngine(usable_blocks, BLOCK)
        self.history = history
        # The examples of the other rules are easier to follow without the look-ahead.
        without_look_ahead = Settings(**{"look_ahead": False, **settings})
        self._under_test = make_queue(self.engine, without_look_ahead, priority_policy)
        self.queue: Any = Recorded(self._under_test, history)
        self._names = 0
        named = [f"{key}={value}" for key, value in settings.items()]
        options = ["policy=priority"] * priority_policy + named
        history.sum_up(
            0, f"a new queue over {about(self.engine)}, {', '.join(options) or 'default settings'}"
        )

    def check(self, observed: Any, expected: Any, rule: str | None = None) -> None:
        """The two are equal, else the failure says the rule, both and the history."""
        __tracebackhide__ = True
        self.history.check(observed, expected, rule)

    def add(
        self,
        job: str | None = None,
        *,
        prompt: int = BLOCK,
        max_tokens: int = 4096,
        **fields: Any,
    ) -> FakeRequest:
        """A request arrives."""
        name = f"r{self._names}" + (f"#job_name[{job}]#" if job is not None else "")
        self._names += 1
        request = FakeRequest(name, prompt, max_tokens, **fields)
        since = len(self.history.events)
        self.queue.add_request(request)
        self.history.sum_up(since, asked(request))
        return request

    def has_room_for(self, request: FakeRequest) -> bool:
        """Whether the free blocks hold all tokens of a request."""
        return request.num_tokens <= self.engine.free_blocks() * BLOCK

    def admit(self) -> FakeRequest:
        """The engine runs the request that is offered."""
        since = len(self.history.events)
        peeked = self.queue.peek_request()
        request: FakeRequest = self.queue.pop_request()
        self.check(request, peeked, "Q2: pop takes what peek showed")
        self.check(request in self.engine.running(), False, f"Q1: {request.request_id} was popped before")
        self.check(self.engine.start(request), True, f"V4: {request.request_id} is offered and finds room")
        self.history.sum_up(since, f"{request.request_id} is offered and runs", self.engine)
        return request

    def preempt(self, request: FakeRequest, output_tokens: int | None = None) -> None:
        """The engine throws a request out, which has so much output by then."""
        if output_tokens is not None:
            request.num_output_tokens = output_tokens
        self.engine.preempt(request)
        output = f"{request.num_output_tokens} tokens of output"
        self.history.note(f"the engine preempts {request.request_id} with {output}", self.engine)
        self.queue.prepend_request(request)

    def finish(self, request: FakeRequest, decoded: int, *, by_itself: bool = True) -> None:
        """A running request is over after ``decoded`` tokens."""
        request.num_output_tokens = decoded
        self.engine.finish(request)
        since = len(self.history.events)
        self.queue.end(request.request_id, by_itself=by_itself)
        ends = "stops" if by_itself else "is aborted"
        self.history.sum_up(since, f"{request.request_id} {ends} after {decoded} tokens", self.engine)

    def abort(self, request: FakeRequest) -> None:
        """A waiting request is taken off the queue and over."""
        since = len(self.history.events)
        self.queue.remove_request(request)
        self.queue.end(request.request_id, by_itself=False)
        self.history.sum_up(since, f"{request.request_id} is aborted while it waits")

    def withhold(self, num_blocks: int) -> None:
        """Something else than a request holds exactly so many blocks."""
        self.engine.withhold(num_blocks)
        self.history.note(f"{num_blocks} blocks are withheld", self.engine)

    def teach(self, job: str, *decoded: int) -> None:
        """Requests of a job come, run and end by themselves after ``decoded`` tokens."""
        for tokens in decoded:
            since = len(self.history.events)
            request = self.add(job)
            while self.admit() is not request:
                since = len(self.history.events)
            self.finish(request, tokens)
            self.history.sum_up(since, f"{request.request_id} comes, runs and stops after {tokens} tokens")

    def offered(self) -> FakeRequest | None:
        """The request that the queue offers, if any."""
        request: FakeRequest | None = self.queue.peek_request() if self.queue else None
        return request

    def peek_raises_index_error(self) -> bool:
        """Whether it does, as it must while nothing is offered."""
        try:
            self._under_test.peek_request()
        except IndexError:
            return True
        return False

    def admit_all(self) -> list[FakeRequest]:
        """Admit as long as something is offered."""
        admitted = []
        while self.queue:
            admitted.append(self.admit())
        return admitted

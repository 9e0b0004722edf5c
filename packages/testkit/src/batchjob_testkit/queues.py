"""What a waiting queue under test looks like, and the specification in that shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from batchjob_spec import jobs, queue
from batchjob_spec.queue import Member, Phase, Settings, State
from batchjob_testkit.fakes import FakeEngine, FakeRequest


class RequestQueue(Protocol):
    """vLLM's ``RequestQueue``: what an engine calls."""

    def __len__(self) -> int:
        """All that wait."""

    def __bool__(self) -> bool:
        """Whether one may be admitted now."""

    def __iter__(self) -> Iterator[Any]:
        """All that wait, in order."""

    def add_request(self, request: Any) -> None:
        """A request arrives."""

    def peek_request(self) -> Any:
        """The next one; IndexError if none may be admitted."""

    def pop_request(self) -> Any:
        """Take the one that was peeked at."""

    def prepend_request(self, request: Any) -> None:
        """One comes back."""

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Several come back."""

    def remove_request(self, request: Any) -> None:
        """Take one off the queue."""

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Take several off the queue."""


class WaitingQueue(RequestQueue, Protocol):
    """A queue that hears what came of its requests, and names what can never fit in ``unservable`` (P2)."""

    def end(self, request_id: str, *, by_itself: bool) -> None:
        """One is over; it stopped or reached its length cap if it ended ``by_itself`` (E3)."""

    def found_in_cache(self, request_id: str, tokens: int) -> None:
        """One started for the first time, and found so many of its tokens in the prefix cache (V4)."""

    def refused(self, request_id: str) -> None:
        """The engine found no room for the one that was offered (V4)."""

    def unservable(self) -> list[Any]:
        """Those that can never fit (P2)."""


def spec_request(request: FakeRequest) -> queue.Request:
    """The request as a value of the specification."""
    params = request.sampling_params
    return queue.Request(
        request_id=request.request_id,
        job=jobs.job_name(request.request_id, params.extra_args if params else None),
        prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        min_tokens=params.min_tokens if params else 0,
        priority=request.priority,
        # Output that is in flight under async scheduling has its place in the KV cache already.
        output_tokens=request.num_output_tokens + request.num_output_placeholders,
        computed_tokens=request.num_computed_tokens,
    )


def _choice(state: State) -> queue.Request | None:
    if state.settings.order == "blend":
        return next(iter(queue.blend_choices(state)), None)
    return queue.offer(state)


class SpecQueue:
    """The specification as a waiting queue: slow, and right by definition."""

    def __init__(self, engine: FakeEngine, settings: Settings, *, priority_policy: bool = False) -> None:
        self._engine = engine
        self._requests: dict[str, FakeRequest] = {}
        self._former: dict[str, Member] = {}
        self._preemptions: dict[str, int] = {}
        self._peeked: str | None = None
        pool = queue.Pool(
            usable_blocks=engine.usable_blocks,
            free_blocks=engine.free_blocks(),
            block_size=engine.block_size,
            step_tokens=engine.step_tokens,
            lookahead_tokens=engine.lookahead_tokens,
            max_running=engine.max_running,
            padding_tokens=engine.padding_tokens,
        )
        self._state = queue.start(pool, settings, priority_policy)
        self.choose: Callable[[State], queue.Request | None] = _choice
        """What is offered; the specification's own choice unless something else is followed."""

    @property
    def state(self) -> State:
        """The state as of now: what the engine runs and what is free are read from it."""
        state = queue.resize(self._state, self._engine.free_blocks())
        self._state = queue.run(state, [spec_request(r) for r in self._engine.running()])
        return self._state

    def __len__(self) -> int:
        return len(self._state.waiting)

    def __bool__(self) -> bool:
        return self._offer() is not None

    def __iter__(self) -> Iterator[FakeRequest]:
        state = self.state
        fitting = [m for m in state.waiting if not queue.can_never_fit(m, state.pool)]
        never = [m for m in state.waiting if queue.can_never_fit(m, state.pool)]
        for member in [*sorted(fitting, key=lambda m: queue.order_key(state, m)), *never]:
            yield self._requests[member.request.request_id]

    def add_request(self, request: FakeRequest) -> None:
        member = self._state.find(request.request_id)
        if member is None:
            self._requests[request.request_id] = request
            self._preemptions[request.request_id] = request.num_preemptions
            self._state = queue.arrive(self._state, spec_request(request))

    def peek_request(self) -> FakeRequest:
        self._peeked = self._offer()
        if self._peeked is None:
            raise IndexError("no request may be admitted now")
        return self._requests[self._peeked]

    def pop_request(self) -> FakeRequest:
        name, self._peeked = self._peeked or self._offer(), None
        if name is None:
            raise IndexError("no request may be admitted now")
        member = self._state.find(name)
        assert member is not None
        self._former[name] = member
        self._state = queue.take(self._state, name)
        return self._requests[name]

    def prepend_request(self, request: FakeRequest) -> None:
        name = request.request_id
        member = self._state.find(name)
        if member is None or member.phase is Phase.WAITING:
            self.add_request(request)
        elif request.num_preemptions > self._preemptions[name]:
            self._preemptions[name] = request.num_preemptions
            member = replace(member, request=spec_request(request), phase=Phase.TAKEN)
            self._state = queue.preempt(self._with(member), name)
        else:
            member = replace(member, request=spec_request(request), phase=Phase.TAKEN)
            self._state = queue.put_back(self._with(member), self._former[name])

    def prepend_requests(self, requests: Iterable[FakeRequest]) -> None:
        for request in list(requests):
            self.prepend_request(request)

    def remove_request(self, request: FakeRequest) -> None:
        if self._peeked == request.request_id:
            self._peeked = None
        self._state = queue.withdraw(self._state, request.request_id)

    def remove_requests(self, requests: Iterable[FakeRequest]) -> None:
        for request in list(requests):
            self.remove_request(request)

    def end(self, request_id: str, *, by_itself: bool) -> None:
        member = self._state.find(request_id)
        if member is None:
            return
        request = self._requests.pop(request_id)
        if self._peeked == request_id:
            self._peeked = None
        if member.phase is not Phase.WAITING:
            ended = replace(spec_request(request), output_tokens=request.num_output_tokens)
            self._state = self._with(replace(member, request=ended))
        self._state = queue.end(self._state, request_id, by_itself)

    def found_in_cache(self, request_id: str, tokens: int) -> None:
        self._state = queue.found_in_cache(self._state, request_id, tokens)

    def refused(self, request_id: str) -> None:
        self._state = queue.refused(self._state, request_id)

    def unservable(self) -> list[FakeRequest]:
        return [self._requests[r.request_id] for r in queue.unservable(self._state)]

    def _offer(self) -> str | None:
        offered = self.choose(self.state)
        return offered.request_id if offered else None

    def _with(self, member: Member) -> State:
        name = member.request.request_id
        members = (member if m.request.request_id == name else m for m in self._state.members)
        return replace(self._state, members=tuple(members))

"""The specification beside the queue of a real vLLM scheduler, asked whenever the scheduler asks it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from batchjob_spec import invariants, queue
from batchjob_spec.blocks import blocks_for
from batchjob_spec.queue import Member, Settings, State
from batchjob_testkit.queues import RequestQueue, SpecQueue, spec_request


class SchedulerView:
    """The KV cache and the running requests of a vLLM scheduler, read from its own ledger."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self.usable_blocks: int = self._pool.num_gpu_blocks - 1
        self.block_size: int = scheduler.block_size
        self.step_tokens: int = scheduler.max_num_scheduled_tokens
        self.lookahead_tokens: int = scheduler.num_lookahead_tokens
        self.max_running: int = scheduler.max_num_running_reqs
        self.padding_tokens = self._padding_tokens()

    def _padding_tokens(self) -> int:
        drafts: int = self._scheduler.num_spec_tokens
        if drafts and self._scheduler.connector is not None:
            step = blocks_for(1 + drafts + self.lookahead_tokens, self.block_size) * self.block_size
            return step - self.lookahead_tokens
        return drafts if self._scheduler.kv_cache_manager.enable_caching else 0

    def free_blocks(self) -> int:
        """Blocks that can be allocated now; the watermark is kept free while others run."""
        kept_free = getattr(self._scheduler.kv_cache_manager, "watermark_blocks", 0) if self.running() else 0
        free: int = self._pool.get_num_free_blocks()
        return max(0, free - kept_free)

    def running(self) -> Sequence[Any]:
        """The requests that run."""
        running: Sequence[Any] = self._scheduler.running
        return running


class EngineSpecQueue(SpecQueue):
    """The specification over requests of vLLM's, which go on changing while they wait."""

    @property
    def state(self) -> State:
        """The state as of now."""
        self._state = replace(self._state, members=tuple(map(self._now, self._state.members)))
        return super().state

    def _now(self, member: Member) -> Member:
        request = spec_request(self._requests[member.request.request_id])
        return member if request == member.request else replace(member, request=request)

    def request(self, request_id: str) -> Any:
        """The engine's request of that ID."""
        return self._requests[request_id]

    def offered(self) -> Any | None:
        """The request to admit next, if any may be."""
        name = self._offer()
        return None if name is None else self._requests[name]


class LockstepQueue:
    """Stands in for a scheduler's waiting queue: passes every call on to it and to the specification.

    Raises:
        AssertionError: as soon as the two differ.
    """

    def __init__(self, scheduler: Any, settings: Settings, *, priority_policy: bool) -> None:
        self._tested: RequestQueue = scheduler.waiting
        self.spec = EngineSpecQueue(SchedulerView(scheduler), settings, priority_policy=priority_policy)  # type: ignore[arg-type]
        scheduler.waiting = self
        for event in ("found_in_cache", "refused"):
            setattr(self._tested, event, self._told_to_both(event))

    def look(self) -> None:
        """Every invariant of the specification holds of the engine's state and of what is offered in it."""
        offered = self._tested.peek_request() if self._tested else None
        state = self.spec.state
        expected = queue.offer(state)
        self._require_the_same(offered, expected and self.spec.request(expected.request_id))
        request = spec_request(offered) if offered is not None else None
        broken = [rule.__name__ for rule in invariants.STATE_INVARIANTS if not rule(state)]
        broken += [rule.__name__ for rule in invariants.OFFER_INVARIANTS if not rule(state, request)]
        assert not broken, f"{', '.join(broken)}: offered {request}, {state}"

    # --- what the scheduler asks --------------------------------------------------------------------------

    def __len__(self) -> int:
        length = len(self._tested)
        assert length == len(self.spec), f"Q4: {length} wait, expected {len(self.spec)}"
        return length

    def __bool__(self) -> bool:
        # Without a peek, which would tell the queue that the scheduler looked at what it offers.
        admissible, expected = bool(self._tested), self.spec.offered()
        if admissible != (expected is not None):
            raise AssertionError(f"Q4: bool is {admissible}, expected {expected}: {self.spec.state}")
        return admissible

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tested)

    def peek_request(self) -> Any:
        """The next one, which the specification offers, too."""
        offered = self._tested.peek_request()
        self._require_the_same(offered, self.spec.peek_request())
        return offered

    def pop_request(self) -> Any:
        """What was peeked at."""
        taken, expected = self._tested.pop_request(), self.spec.pop_request()
        assert taken is expected, f"Q2: pop takes {taken.request_id}, expected {expected.request_id}"
        return taken

    # --- what the scheduler tells -------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """One arrives."""
        self._tested.add_request(request)
        self.spec.add_request(request)

    def prepend_request(self, request: Any) -> None:
        """One comes back."""
        self._tested.prepend_request(request)
        self.spec.prepend_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Several come back."""
        several = list(requests)
        self._tested.prepend_requests(iter(several))
        self.spec.prepend_requests(several)

    def remove_request(self, request: Any) -> None:
        """One is taken off."""
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Several are taken off."""
        several = list(requests)
        self._tested.remove_requests(several)
        self.spec.remove_requests(several)

    def _told_to_both(self, event: str) -> Callable[..., None]:
        tested, spec = getattr(self._tested, event), getattr(self.spec, event)

        def tell(*arguments: Any) -> None:
            tested(*arguments)
            spec(*arguments)

        return tell

    def _require_the_same(self, offered: Any | None, expected: Any | None) -> None:
        if offered is not expected:
            names = [request and request.request_id for request in (offered, expected)]
            raise AssertionError(f"O0 to O6: {names[0]} is offered, expected {names[1]}: {self.spec.state}")

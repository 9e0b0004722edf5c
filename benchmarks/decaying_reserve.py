"""A peer: the longest ``max_tokens`` first, behind a reserve for what runs that decays.

The policy that SGLang documents as ``lof`` with its ``new_token_ratio``, on vLLM's scheduler: of what each
running request may still decode, a share is kept free. The share falls step by step, and a preemption
raises it to what the running requests have shown to need.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

FIRST_SHARE = 0.7
LEAST_SHARE = 0.14 * FIRST_SHARE
DECAY_STEPS = 600
STEPS_AHEAD = 20
"""After a preemption each running request is expected to decode so many tokens more, at least."""
MOST_TOKENS = 4096
"""No request is expected to decode more, whatever its ``max_tokens``."""


def _rank(request: Request) -> tuple[int, float]:
    return (-request.max_tokens, request.arrival_time)


class LongestFirstQueue(RequestQueue):
    """Offers the longest ``max_tokens`` if it finds room beside the reserve; preempted ones come first."""

    def __init__(self, scheduler: DecayingReserveScheduler) -> None:
        self._scheduler = scheduler
        self._preempted: list[Request] = []
        self._waiting: list[Request] = []

    def __len__(self) -> int:
        return len(self._preempted) + len(self._waiting)

    def __bool__(self) -> bool:
        return len(self) > 0 and self._scheduler.has_room_for(self._head())

    def __iter__(self) -> Iterator[Request]:
        return iter([*self._preempted, *self._waiting])

    def _head(self) -> Request:
        return (self._preempted or self._waiting)[0]

    def add_request(self, request: Request) -> None:
        """A request arrives."""
        insort(self._waiting, request, key=_rank)

    def peek_request(self) -> Request:
        """The next one."""
        return self._head()

    def pop_request(self) -> Request:
        """Take the next one."""
        return (self._preempted or self._waiting).pop(0)

    def prepend_request(self, request: Request) -> None:
        """One was preempted."""
        self._preempted.insert(0, request)
        self._scheduler.raise_share()

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Several were taken and not started."""
        self._preempted[:0] = requests

    def remove_request(self, request: Request) -> None:
        """Take one off the queue."""
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take several off the queue."""
        gone = set(requests)
        self._preempted = [request for request in self._preempted if request not in gone]
        self._waiting = [request for request in self._waiting if request not in gone]


class DecayingReserveScheduler(Scheduler):
    """vLLM's scheduler over that queue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waiting = LongestFirstQueue(self)
        self._share = FIRST_SHARE

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """A step, after which the share is smaller."""
        output = super().schedule(*args, **kwargs)
        decay = (FIRST_SHARE - LEAST_SHARE) / DECAY_STEPS
        self._share = max(LEAST_SHARE, self._share - decay)
        return output

    def has_room_for(self, request: Request) -> bool:
        """Whether the free blocks hold a request to its end, and the reserve of all that runs."""
        if not self.running:
            return True
        free_tokens = self.kv_cache_manager.block_pool.get_num_free_blocks() * self.block_size
        reserve = self._share * sum(_tokens_left(running) for running in self.running)
        return request.num_tokens + _tokens_left(request) <= free_tokens - reserve

    def raise_share(self) -> None:
        """The share that the running requests would have needed so far."""
        decoded = sum(running.num_output_tokens for running in self.running)
        allowed = sum(running.max_tokens for running in self.running)
        if allowed:
            self._share = min(1.0, (decoded + STEPS_AHEAD * len(self.running)) / allowed)


def _tokens_left(request: Request) -> int:
    return min(request.max_tokens - request.num_output_tokens, MOST_TOKENS)

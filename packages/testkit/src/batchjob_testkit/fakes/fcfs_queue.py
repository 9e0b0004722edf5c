"""The plain waiting queue: first come, first served, or by priority where that is the policy."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from typing import Any

from batchjob_testkit.fakes.request import FakeRequest


class FCFSQueue:
    """Offers the request at its head, whether it fits or not; it does not know what never fits.

    >>> queue = FCFSQueue()
    >>> queue.add_request(FakeRequest("1", num_prompt_tokens=20, max_tokens=8))
    >>> queue.prepend_request(FakeRequest("2", num_prompt_tokens=20, max_tokens=8))
    >>> [request.request_id for request in queue]
    ['2', '1']
    """

    def __init__(self, engine: object = None, settings: object = None, priority_policy: bool = False) -> None:
        """The first two are what any queue is made from; this one needs neither."""
        del engine, settings
        self._priority_policy = priority_policy
        self._waiting: list[FakeRequest] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[FakeRequest]:
        return iter(self._waiting)

    def add_request(self, request: FakeRequest) -> None:
        """A request arrives."""
        if self._priority_policy:
            insort(self._waiting, request, key=_urgency)
        else:
            self._waiting.append(request)

    def peek_request(self) -> FakeRequest:
        """The head; IndexError if there is none."""
        return self._waiting[0]

    def pop_request(self) -> FakeRequest:
        """Take the head; IndexError if there is none."""
        return self._waiting.pop(0)

    def prepend_request(self, request: FakeRequest) -> None:
        """One comes back, to the head unless priorities place it."""
        if self._priority_policy:
            self.add_request(request)
        else:
            self._waiting.insert(0, request)

    def prepend_requests(self, requests: Iterable[FakeRequest]) -> None:
        """Several come back, each before the last."""
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: FakeRequest) -> None:
        """Take one off the queue; what is not there changes nothing."""
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[FakeRequest]) -> None:
        """Take several off the queue."""
        gone = {id(request) for request in requests}
        self._waiting = [request for request in self._waiting if id(request) not in gone]


def _urgency(request: FakeRequest) -> tuple[Any, ...]:
    return (request.priority, request.arrival_time, request.request_id)

"""What can happen to a queue, as values: a history is a sequence of them.

``which`` counts among the requests that an event can befall and starts over at their end, so that
every history can be played on every queue. An event that can befall none does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from batchjob_testkit.bench import Bench
from batchjob_testkit.fakes import FakeRequest


@dataclass(frozen=True, slots=True)
class Arrive:
    """A request of ``job`` arrives."""

    job: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Admit:
    """The engine runs what is offered, if it finds room."""


@dataclass(frozen=True, slots=True)
class Preempt:
    """A running request is thrown out."""

    which: int


@dataclass(frozen=True, slots=True)
class Finish:
    """A running request stops after ``decoded`` tokens."""

    which: int
    decoded: int


@dataclass(frozen=True, slots=True)
class Abort:
    """A waiting request is aborted."""

    which: int


@dataclass(frozen=True, slots=True)
class Withhold:
    """Something else than a request holds so many blocks, as far as they are free."""

    num_blocks: int


Event = Arrive | Admit | Preempt | Finish | Abort | Withhold


def play(history: Iterable[Event], bench: Bench) -> None:
    """Let everything happen to the queue of a bench, one event after the other."""
    for event in history:
        _play_one(event, bench)


def _play_one(event: Event, bench: Bench) -> None:
    running = list(bench.engine.running())
    if isinstance(event, Arrive):
        bench.add(event.job, prompt=event.prompt_tokens)
    elif isinstance(event, Admit):
        # To an idle engine what fits the empty pool is offered, even while blocks are withheld (P1).
        if bench.queue and bench.has_room_for(bench.queue.peek_request()):
            bench.admit()
    elif isinstance(event, Withhold):
        bench.withhold(event.num_blocks)
    elif isinstance(event, Abort):
        waiting = sorted(bench.queue, key=lambda request: str(request.request_id))
        if waiting:
            bench.abort(_pick(waiting, event.which))
    elif running and isinstance(event, Preempt):
        bench.preempt(_pick(running, event.which))
    elif running and isinstance(event, Finish):
        bench.finish(_pick(running, event.which), event.decoded)


def _pick(requests: Sequence[FakeRequest], which: int) -> FakeRequest:
    return requests[which % len(requests)]

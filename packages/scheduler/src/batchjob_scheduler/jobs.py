"""Which job a request belongs to, and the jobs that are tracked (rules J1 to J4)."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Iterator
from sys import intern
from typing import Final

from sortedcontainers import SortedList

from batchjob_scheduler.engine_view import Request
from batchjob_scheduler.estimator import DecodeLengthEstimator

DEFAULT_JOB: Final = "__default__"
MAX_IDLE_JOBS: Final = 1024
PROBES_PER_JOB: Final = 3

STARTS_TO_KNOW_A_PREFIX: Final = 3
"""So many requests of a job must have found a prefix in the cache, one after the other (V4)."""

_TAG: Final = re.compile(r"#job_name\[([^\[\]]+)\]#")


def job_name(request: Request) -> str:
    """The job that a request names: in its extra arguments, else in its ID, else the default one."""
    extra_args = getattr(request.sampling_params, "extra_args", None)
    if isinstance(extra_args, dict):
        named = extra_args.get("job_name")
        if isinstance(named, str) and named:
            return named
    return tagged_job(request.request_id) or DEFAULT_JOB


def tagged_job(request_id: str) -> str | None:
    """The name in the first ``#job_name[NAME]#`` of a request ID.

    >>> tagged_job("0_chatcmpl-#job_name[news]#req_001-5f3a")
    'news'
    """
    tag = _TAG.search(request_id)
    # All requests of a job share the string.
    return intern(tag[1]) if tag else None


class Job:
    """A job that has a place of its own, with what was learnt of it and what it did."""

    __slots__ = (
        "appeared",
        "arrived",
        "estimator",
        "finished",
        "found",
        "name",
        "preemptions",
        "running",
        "started",
        "steps",
        "turn",
        "waiting",
        "waiting_tokens",
    )

    def __init__(self, name: str, appeared: int, alpha: float) -> None:
        self.name = name
        self.appeared = appeared
        self.estimator = DecodeLengthEstimator(alpha)
        # What the last of its requests to start found in the prefix cache, in tokens.
        self.found: tuple[int, ...] = ()
        self.arrived = 0
        self.running = 0
        self.started = 0
        self.finished = 0
        self.preemptions = 0
        self.steps = 0
        self.turn = 0.0
        self.waiting = 0
        self.waiting_tokens = 0

    @property
    def is_known(self) -> bool:
        """Whether one of its requests has ended, so that its prediction says something of it (E2)."""
        return self.estimator.observations > 0

    @property
    def is_probing(self) -> bool:
        """Whether little was observed of it and little has started (O2)."""
        return self.started < PROBES_PER_JOB and self.estimator.observations < PROBES_PER_JOB

    @property
    def shared_tokens(self) -> int:
        """What its next request shares with one of it that is with the engine (V4)."""
        known = self.running and len(self.found) == STARTS_TO_KNOW_A_PREFIX
        return min(self.found) if known else 0

    @property
    def tokens_to_start(self) -> int:
        """What its waiting requests have to compute before they decode, less what each of them shares."""
        return max(0, self.waiting_tokens - self.waiting * self.shared_tokens)

    def find_in_cache(self, tokens: int) -> None:
        """One of its requests started and found so many of its tokens in the prefix cache."""
        self.found = (*self.found, tokens)[-STARTS_TO_KNOW_A_PREFIX:]

    def count_waiting(self, requests: int, tokens: int) -> None:
        """So many requests more, or less, wait for so many tokens to be computed."""
        self.waiting += requests
        self.waiting_tokens += tokens

    @property
    def order_key(self) -> tuple[int, int, str]:
        """Longest prediction first, then order of appearance."""
        return (-self.estimator.predicted_tokens, self.appeared, self.name)


class JobTable:
    """The tracked jobs. Names that find no place share the default job until one is free (J4)."""

    def __init__(self, max_jobs: int, alpha: float) -> None:
        self._max_jobs = max_jobs
        self._alpha = alpha
        self._tracked: dict[str, Job] = {}
        self._appearances = 0
        self._live: Counter[str] = Counter()
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._displaced: OrderedDict[str, None] = OrderedDict()
        self._live_in_order: SortedList[tuple[int, int, str]] = SortedList()
        self.forgotten = 0

    def __iter__(self) -> Iterator[Job]:
        """The tracked jobs in order of appearance."""
        return iter(self._tracked.values())

    def placed(self, name: str) -> Job:
        """The job under which requests that name ``name`` are scheduled."""
        job = self._tracked.get(name)
        return job if job is not None else self._tracked[DEFAULT_JOB]

    def longest_first(self, short_threshold: int, *, long_first: bool) -> Iterator[Job]:
        """The live jobs by class, then prediction, then appearance (O3, O4)."""
        order = self._live_in_order
        first_short = order.bisect_left((-short_threshold, -1, ""))
        spans = [(0, first_short), (first_short, len(order))]
        for start, stop in spans if long_first else reversed(spans):
            for _, _, name in order.islice(start, stop):
                yield self._tracked[name]

    def arrive(self, name: str) -> Job:
        """Count one more live request of ``name``; returns the job that it is scheduled under."""
        self._live[name] += 1
        if name not in self._tracked and name not in self._displaced:
            self._track_or_displace(name)
        elif name in self._idle:
            del self._idle[name]
            self._live_in_order.add(self._tracked[name].order_key)
        return self.placed(name)

    def observe(self, job: Job, decoded_tokens: int) -> None:
        """A request of a job ended by itself after ``decoded_tokens`` tokens (E2, E3)."""
        before = job.order_key
        job.estimator.observe(decoded_tokens)
        if job.order_key != before and before in self._live_in_order:
            self._live_in_order.remove(before)
            self._live_in_order.add(job.order_key)

    def leave(self, name: str) -> list[str]:
        """Count one live request of ``name`` less; returns the names that got a place by it."""
        self._live[name] -= 1
        if self._live[name] > 0:
            return []
        del self._live[name]
        if name in self._displaced:
            del self._displaced[name]
        elif name != DEFAULT_JOB:
            self._live_in_order.remove(self._tracked[name].order_key)
            self._idle[name] = None
        return self._hand_out_places()

    def _track_or_displace(self, name: str) -> None:
        if name != DEFAULT_JOB and not self._has_free_place():
            if not self._idle:
                self._displaced[name] = None
                if DEFAULT_JOB not in self._tracked:
                    self._track(DEFAULT_JOB)
                return
            self._forget_least_recent()
        self._track(name)

    def _track(self, name: str) -> None:
        job = Job(name, self._appearances, self._alpha)
        self._appearances += 1
        self._tracked[name] = job
        self._live_in_order.add(job.order_key)

    def _hand_out_places(self) -> list[str]:
        promoted: list[str] = []
        while self._displaced and (self._idle or self._has_free_place()):
            if not self._has_free_place():
                self._forget_least_recent()
            name, _ = self._displaced.popitem(last=False)
            self._track(name)
            promoted.append(name)
        while self._max_jobs == 0 and len(self._idle) > MAX_IDLE_JOBS:
            self._forget_least_recent()
        return promoted

    def _has_free_place(self) -> bool:
        named = len(self._tracked) - (DEFAULT_JOB in self._tracked)
        return self._max_jobs == 0 or named < self._max_jobs

    def _forget_least_recent(self) -> None:
        name, _ = self._idle.popitem(last=False)
        del self._tracked[name]
        self.forgotten += 1

"""Deliberately naive implementations: lists, scanned with the rules in plain Python.

They share no code with the specification, so a mistake in the contracts that the specification
happens to share would be seen.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction


class NaiveEstimator:
    """Remembers every length and averages them anew each time, in exact arithmetic."""

    def __init__(self, alpha):
        self.alpha = Fraction(alpha)
        self.lengths = []

    def observe(self, decoded_tokens):
        self.lengths.append(decoded_tokens)

    def predicted_tokens(self):
        if not self.lengths:
            return 128
        average = Fraction(self.lengths[0])
        for length in self.lengths[1:]:
            average += self.alpha * (length - average)
        return math.floor(average)

    def remaining_tokens(self, output_tokens, min_tokens, max_tokens):
        length = self.predicted_tokens()
        length = max(length, min_tokens, 1)
        length = min(length, max_tokens)
        return max(length - output_tokens, 1)


class NaiveReservation:
    """Plays the next two steps through, and the decode of all that runs."""

    def __init__(self, engine, settings):
        self.engine = engine
        self.settings = settings

    def blocks(self, tokens):
        return math.ceil(Fraction(tokens, self.engine.block_size))

    def next_step_blocks(self, request):
        computed, known = request.num_computed_tokens, request.num_tokens
        ends = []
        for _ in ("the current step", "the one after"):
            computed = min(known, computed + self.engine.step_tokens)
            ends.append(self.blocks(computed + self.engine.lookahead_tokens))
            if computed == known:
                known += 1  # it has sampled a token
        return ends[1] - ends[0]

    def budget_tokens(self):
        reserve = self.settings.reserve_margin_blocks
        for request in self.engine.running():
            reserve += self.next_step_blocks(request)
        left = self.engine.free_blocks() - min(reserve, self.settings.reserve_max_blocks)
        return left * self.engine.block_size if left > 0 else 0

    def predicted_peak_tokens(self, running, candidate):
        members = [*running, candidate]
        peak = 0
        for step in range(1, candidate[1] + 1):
            peak = max(peak, sum(held + step for held, remaining in members if remaining >= step))
        return peak


@dataclass(eq=False)
class Entry:
    """A live request."""

    request: object
    name: str
    arrival: int
    ordinal: int = 0
    waits: bool = True
    with_engine: bool = False
    started: bool = False
    first_start: bool = False
    preemptions: int = 0
    preempted_at: int | None = None
    held_back: bool = False


@dataclass(eq=False)
class Job:
    """A job with a place."""

    name: str
    last_used: int
    estimator: NaiveEstimator
    arrived: int = 0
    started: int = 0
    found: tuple = ()


class NaiveQueue:
    """All entries in one list and all jobs in another, scanned at each question."""

    def __init__(self, engine, settings, priority_policy):
        self.engine = engine
        self.settings = settings
        self.priority_policy = priority_policy
        self.reservation = NaiveReservation(engine, settings)
        self.entries = []
        self.jobs = []  # in order of appearance
        self.displaced = []
        self.peeked = None
        self.now = 0

    # --- questions ------------------------------------------------------------------------------------

    def __len__(self):
        return len(self.waiting())

    def __bool__(self):
        return self.choose() is not None

    def __iter__(self):
        fitting = [e for e in self.waiting() if not self.is_too_large(e)]
        too_large = [e for e in self.waiting() if self.is_too_large(e)]
        return iter([e.request for e in sorted(fitting, key=self.place) + too_large])

    def unservable(self):
        return [e.request for e in self.waiting() if self.is_too_large(e)]

    def waiting(self):
        return [e for e in self.entries if e.waits]

    def choose(self):
        if len(self.engine.running()) >= self.engine.max_running:
            return None
        size, free = self.engine.block_size, self.engine.free_blocks()
        limits = [self.reservation.budget_tokens()]
        if not self.engine.running():
            limits += [free * size, self.engine.usable_blocks * size]
        for limit in limits:
            for entry in sorted(self.waiting(), key=self.place):
                need = self.charge(entry)
                fits = self.reservation.blocks(need) * size <= limit
                if fits and not self.is_too_large(entry) and not self.must_wait(entry):
                    return entry
        return None

    def place(self, entry):
        request, job = entry.request, self.job_of(entry)
        priority = request.priority if self.priority_policy else 0
        if entry.preempted_at is not None:
            return (priority, 0, entry.preempted_at)
        if entry.ordinal < 3 and job.started < 3 and len(job.estimator.lengths) < 3:
            return (priority, 1, entry.arrival)
        predicted = job.estimator.predicted_tokens()
        short = predicted <= self.settings.short_decode_token_threshold
        much = self.reservation.budget_tokens() > self.settings.low_available_tokens_threshold
        last = short if much else not short
        need = request.num_tokens - request.num_computed_tokens
        return (priority, 2, last, -predicted, self.jobs.index(job), -need, entry.arrival)

    def charge(self, entry):
        need = entry.request.num_tokens - entry.request.num_computed_tokens
        job = self.job_of(entry)
        for other in self.entries:
            if self.job_of(other) is job and other.with_engine and len(job.found) >= 3:
                least = min(need, 1)
                return max(least, need - min(job.found[-3:]))
        return need

    def is_too_large(self, entry):
        return entry.request.num_tokens > self.engine.max_request_tokens

    def must_wait(self, entry):
        running = self.engine.running()
        if not running or not (self.settings.look_ahead or entry.held_back):
            return False
        size = self.engine.block_size
        members = [self.held_and_remaining(e) for e in self.entries if e.request in running]
        need = self.charge(entry)
        candidate = (self.reservation.blocks(need) * size, self.held_and_remaining(entry)[1])
        peak = self.reservation.predicted_peak_tokens(members, candidate)
        blocks = self.engine.free_blocks()
        for request in running:
            computed = request.num_computed_tokens + self.engine.step_tokens
            blocks += self.reservation.blocks(min(request.num_tokens, computed))
        return peak > blocks * size * 19 // 20

    def held_and_remaining(self, entry):
        request, estimator = entry.request, self.job_of(entry).estimator
        held = self.reservation.blocks(request.num_tokens) * self.engine.block_size
        if entry.waits and entry.preempted_at is None:  # not started, so like its job
            remaining = estimator.predicted_tokens() if estimator.lengths else 256
        elif estimator.lengths:
            limits = (request.sampling_params.min_tokens, request.max_tokens)
            remaining = estimator.remaining_tokens(request.num_output_tokens, *limits)
        else:
            remaining = request.max_tokens - request.num_output_tokens
        return held, max(1, min(remaining, 256))

    def job_of(self, entry):
        named = [job for job in self.jobs if job.name == entry.name]
        shared = [job for job in self.jobs if job.name == "__default__"]
        return (named + shared)[0]

    def find(self, request_id):
        return next((e for e in self.entries if e.request.request_id == request_id), None)

    # --- what the engine does -------------------------------------------------------------------------

    def add_request(self, request):
        if self.find(request.request_id) is not None:
            return
        self.now += 1
        entry = Entry(request, name_of(request), self.now, preemptions=request.num_preemptions)
        self.entries.append(entry)
        self.give_place(entry.name)
        job = self.job_of(entry)
        entry.ordinal, job.arrived, job.last_used = job.arrived, job.arrived + 1, self.now

    def peek_request(self):
        self.peeked = self.choose()
        if self.peeked is None:
            raise IndexError("nothing may be admitted")
        return self.peeked.request

    def pop_request(self):
        entry, self.peeked = self.peeked or self.choose(), None
        if entry is None:
            raise IndexError("nothing may be admitted")
        entry.waits, entry.with_engine = False, True
        entry.first_start, entry.started = not entry.started, True
        self.job_of(entry).started += entry.first_start
        return entry.request

    def prepend_request(self, request):
        self.now += 1
        entry = self.find(request.request_id)
        if entry is None:
            self.add_request(request)
            return
        if entry.waits:
            return
        entry.waits, entry.with_engine = True, False
        if request.num_preemptions > entry.preemptions:
            entry.preemptions, entry.preempted_at, entry.held_back = request.num_preemptions, self.now, True
        elif entry.first_start:
            entry.started = entry.first_start = False
            job = self.job_of(entry)
            job.started = max(0, job.started - 1)

    def prepend_requests(self, requests):
        for request in list(requests):
            self.prepend_request(request)

    def remove_request(self, request):
        for entry in self.waiting():
            if entry.request is request:
                entry.waits = False
                self.peeked = None if self.peeked is entry else self.peeked

    def remove_requests(self, requests):
        for request in list(requests):
            self.remove_request(request)

    def end(self, request_id, *, by_itself):
        entry = self.find(request_id)
        if entry is None:
            return
        self.now += 1
        job = self.job_of(entry)
        job.last_used = self.now
        if by_itself:
            job.estimator.observe(entry.request.num_output_tokens)
        self.entries.remove(entry)
        self.peeked = None if self.peeked is entry else self.peeked
        for other in self.entries:
            other.held_back = False
        self.hand_out_places()

    def found_in_cache(self, request_id, tokens):
        entry = self.find(request_id)
        if entry is not None:
            self.job_of(entry).found += (tokens,)

    def refused(self, request_id):
        entry = self.find(request_id)
        if entry is not None:
            self.job_of(entry).found = ()

    # --- places of jobs -------------------------------------------------------------------------------

    def idle_jobs(self):
        live = {e.name for e in self.entries} | {"__default__"}
        return sorted((job for job in self.jobs if job.name not in live), key=lambda job: job.last_used)

    def has_room(self):
        named = [job for job in self.jobs if job.name != "__default__"]
        return self.settings.max_jobs == 0 or len(named) < self.settings.max_jobs

    def give_place(self, name):
        if name in self.displaced or any(job.name == name for job in self.jobs):
            return
        if name != "__default__" and not self.has_room():
            if not self.idle_jobs():
                self.displaced.append(name)
                self.give_place("__default__")
                return
            self.jobs.remove(self.idle_jobs()[0])
        self.jobs.append(Job(name, self.now, NaiveEstimator(self.settings.ewma_alpha)))

    def hand_out_places(self):
        self.displaced = [name for name in self.displaced if any(e.name == name for e in self.entries)]
        while self.displaced and (self.has_room() or self.idle_jobs()):
            name = self.displaced.pop(0)
            self.give_place(name)
            for entry in self.entries:
                if entry.name == name:
                    job = self.job_of(entry)
                    entry.ordinal, job.arrived = job.arrived, job.arrived + 1
                    job.started += entry.started
        while self.settings.max_jobs == 0 and len(self.idle_jobs()) > 1024:
            self.jobs.remove(self.idle_jobs()[0])


def name_of(request):
    named = (request.sampling_params.extra_args or {}).get("job_name")
    tag = re.search(r"#job_name\[([^][]+)]#", request.request_id)
    return named or (tag[1] if tag else "__default__")

"""The waiting queue: which request is admitted next (rules O, Q, P).

:class:`BatchJobQueue` has the methods of vLLM's ``RequestQueue`` and no import of vLLM. Inside it,
requests lie in one level per priority; a level holds the preempted requests in the order of their
preemption, the probes in the order of arrival, and for each job its requests sorted by need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from sys import maxsize
from typing import Final, TypeAlias

from sortedcontainers import SortedDict, SortedKeyList

from batchjob_scheduler.blend import Turns, place_in_turn
from batchjob_scheduler.config import BatchJobConfig
from batchjob_scheduler.engine_view import EngineView, Request
from batchjob_scheduler.estimator import DecodeLengthEstimator, held_between
from batchjob_scheduler.forecast import Forecast, JobWork, forecast
from batchjob_scheduler.jobs import DEFAULT_JOB, PROBES_PER_JOB, Job, JobTable, job_name
from batchjob_scheduler.reservation import (
    LOOK_AHEAD_TOKENS,
    charged_tokens,
    known_tokens,
    within_look_ahead,
)
from batchjob_scheduler.running import Running

# A forecast changes little from one step or event to the next, and costs a look at all that runs. A step
# changes what is left of each request that runs, an arrival, a start or an end that of one.
_CHANGES_TO_A_FORECAST: Final = 64
_CHANGES_OF_A_STEP: Final = 8

# More than ever arrive, so that a need and an arrival are one number to sort by.
_MOST_ARRIVALS: Final = 1 << 48


_Ends: TypeAlias = tuple[DecodeLengthEstimator, int, int, int]
"""The estimator of a request's job, its prompt, and the fewest and the most tokens that it ends with."""


class _Entry:
    """A live request with what the queue remembers of it until its end is reported."""

    __slots__ = (
        "counted_as_started",
        "is_early",
        "job",
        "job_name",
        "num_preemptions",
        "preempted_at",
        "priority",
        "request",
        "runs",
        "sort_key",
        "started",
        "waiting",
    )

    def __init__(self, request: Request, job_name: str, arrival: int, priority: int) -> None:
        self.request = request
        self.job_name = job_name
        self.priority = priority
        self.sort_key = -arrival
        self.num_preemptions = 0
        self.preempted_at: int | None = None
        self.runs = False
        self.started = False
        self.counted_as_started = False
        self.waiting = False

    @property
    def arrival(self) -> int:
        return -self.sort_key % _MOST_ARRIVALS

    @property
    def need_tokens(self) -> int:
        return -(-self.sort_key // _MOST_ARRIVALS)

    @need_tokens.setter
    def need_tokens(self, tokens: int) -> None:
        # One whole number takes less memory than two. Of equal needs the earliest arrival sorts last,
        # as it is taken from the end.
        self.sort_key = tokens * _MOST_ARRIVALS - self.arrival

    def arrive_at(self, job: Job) -> None:
        """Be scheduled under a job from now on, as the last of it to arrive."""
        self.job = job
        self.is_early = job.arrived < PROBES_PER_JOB
        job.arrived += 1


_by_need = attrgetter("sort_key")
_by_arrival = attrgetter("arrival")


class _Level:
    """The waiting requests of one priority."""

    __slots__ = ("by_job", "preempted", "probes")

    def __init__(self) -> None:
        self.preempted: SortedDict[int, _Entry] = SortedDict()
        self.probes: SortedDict[int, _Entry] = SortedDict()
        self.by_job: dict[str, SortedKeyList[_Entry, int]] = {}

    def __bool__(self) -> bool:
        return bool(self.preempted or self.by_job)

    def insert(self, entry: _Entry, job: Job) -> None:
        if entry.preempted_at is not None:
            self.preempted[entry.preempted_at] = entry
            return
        if entry.is_early:
            self.probes[entry.arrival] = entry
        of_job = self.by_job.get(job.name)
        if of_job is None:
            of_job = self.by_job[job.name] = SortedKeyList(key=_by_need)
        of_job.add(entry)

    def discard(self, entry: _Entry, job: Job) -> None:
        if entry.preempted_at is not None:
            self.preempted.pop(entry.preempted_at, None)
            return
        if entry.is_early:
            self.probes.pop(entry.arrival, None)
        of_job = self.by_job.get(job.name)
        if of_job is not None:
            of_job.discard(entry)
            if not of_job:
                del self.by_job[job.name]


class BatchJobQueue:
    """A waiting queue that knows jobs, for one engine.

    The engine adds, peeks, pops, prepends and removes as it does with its own queues. Besides, the
    scheduler reports each request that is over with :meth:`end`, and ends those that
    :meth:`unservable` names. ``bool(queue)`` says whether a request may be admitted now, ``len``
    how many wait.
    """

    def __init__(self, config: BatchJobConfig, engine: EngineView, *, priority_policy: bool = False) -> None:
        self.jobs = JobTable(config.max_jobs, config.ewma_alpha)
        self._config = config
        self._engine = engine
        self._priority_policy = priority_policy
        self._levels: SortedDict[int, _Level] = SortedDict()
        self._entries: dict[str, _Entry] = {}
        self._displaced: dict[str, set[_Entry]] = {}
        self._too_large: dict[str, _Entry] = {}
        self._preempted: dict[str, _Entry] = {}
        self._offered: _Entry | None = None
        self._running = Running(engine, config, self._end_of)
        # What was chosen, and the state that it was chosen in; kept within a step.
        self._choice: _Entry | None = None
        self._chosen_in: tuple[int, int, int] | None = None
        self._changes = 0
        self._turns = Turns() if config.order == "blend" else None
        self._forecast: Forecast | None = None
        self._forecast_at = 0
        self._waiting = 0
        self._arrivals = 0
        self._preemptions = 0
        # Between which ends the prediction of a running request is held.
        self._ends: dict[str, _Ends] = {}
        # Of those that started only, so that what waits takes little memory.
        self._just_preempted: set[_Entry] = set()
        self._strides: dict[_Entry, float] = {}

    @property
    def blends(self) -> bool:
        """Whether jobs run side by side, and long prompts beside short ones (O5b, O5c)."""
        return self._turns is not None

    # --- what the engine calls --------------------------------------------------------------------

    def __len__(self) -> int:
        return self._waiting

    def __bool__(self) -> bool:
        return self._choose() is not None

    def __iter__(self) -> Iterator[Request]:
        """All that wait, in order, whether they fit or not; each job's longest first."""
        self._running.look()
        for level in self._levels.values():
            probes = [entry for entry in level.probes.values() if entry.job.is_probing]
            for entry in (*level.preempted.values(), *probes):
                yield entry.request
            for of_job in self._jobs_in_order(level, self._running.budget_blocks()):
                for entry in reversed(of_job):
                    if entry not in probes:
                        yield entry.request
        for entry in self._too_large.values():
            yield entry.request

    def peek_request(self) -> Request:
        """The request to admit next.

        Raises:
            IndexError: if none may be admitted now; ask ``bool(queue)`` first.
        """
        self._offered = self._choose()
        if self._offered is None:
            raise IndexError(f"no request may be admitted now, {len(self)} wait")
        return self._offered.request

    def pop_request(self) -> Request:
        """Take the request that was peeked at last, or the next one if that is gone.

        Raises:
            IndexError: if none may be admitted now.
        """
        entry = self._offered or self._choose()
        if entry is None:
            raise IndexError(f"no request may be admitted now, {len(self)} wait")
        self._take_out(entry)
        self._count_running(entry, True)
        self._count_started(entry)
        return entry.request

    def add_request(self, request: Request) -> None:
        """A request arrives, or a session that was served goes on with its next turn."""
        entry = self._known(request)
        if not entry.waiting:
            entry.preempted_at = None
            self._put_in(entry)

    def prepend_request(self, request: Request) -> None:
        """A request comes back: preempted, or taken and not started."""
        entry = self._known(request)
        if entry.waiting:
            return
        if request.num_preemptions > entry.num_preemptions:
            self._note_preemption(entry)
        else:
            self._uncount_started(entry)
        self._put_in(entry)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Several come back; their places follow from the rules, not from the order given here."""
        for request in list(requests):
            self.prepend_request(request)

    def remove_request(self, request: Request) -> None:
        """Take a request off the queue; what is not there changes nothing."""
        entry = self._entries.get(request.request_id)
        if entry is not None and entry.waiting and entry.request is request:
            self._take_out(entry)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take several requests off the queue."""
        for request in list(requests):
            self.remove_request(request)

    # --- what the scheduler reports ---------------------------------------------------------------

    def end(self, request_id: str, *, by_itself: bool) -> None:
        """A request is over; it is observed if it ended by itself (E3). Unknown ones are ignored."""
        entry = self._entries.get(request_id)
        if entry is not None:
            if by_itself:
                self.jobs.observe(entry.job, entry.request.num_output_tokens)
            self._end(entry)

    def found_in_cache(self, request_id: str, tokens: int) -> None:
        """A request started for the first time and found so many of its tokens in the prefix cache (V4)."""
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.job.find_in_cache(tokens)

    def refused(self, request_id: str) -> None:
        """The engine found no room for what was offered, so its job shares less than it seemed to (V4)."""
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.job.found = ()

    def begin_step(self) -> None:
        """The engine decides on a step; until :meth:`end_step` what runs computes nothing."""
        self._offered = None
        self._chosen_in = None
        self._changes += _CHANGES_OF_A_STEP
        self._running.begin_step()

    def end_step(self) -> None:
        """The engine has decided; what it looked at and left where it is, it had no room for."""
        if self._offered is not None:
            self.refused(self._offered.request.request_id)
        self._running.end_step()

    def unservable(self) -> list[Request]:
        """The waiting requests that even the empty pool cannot hold (P2)."""
        most = self._engine.max_request_tokens
        # What was preempted may still grow, by output that was in flight.
        candidates = (*self._too_large.values(), *self._preempted.values())
        return [entry.request for entry in candidates if entry.request.num_tokens > most]

    def live_requests(self, request_ids: Iterable[str]) -> list[Request]:
        """Those requests whose end was not reported yet, in their order of arrival."""
        entries = [entry for name in request_ids if (entry := self._entries.get(name)) is not None]
        return [entry.request for entry in sorted(entries, key=_by_arrival)]

    def forecast(self) -> Forecast:
        """The rest of the batch, predicted anew every few steps and events."""
        if self._forecast is None or self._changes >= self._forecast_at + _CHANGES_TO_A_FORECAST:
            self._running.look()
            pool_tokens = self._running.attainable_tokens()
            self._forecast = forecast(self._work_left(), self._engine.max_running, pool_tokens)
            self._forecast_at = self._changes
        return self._forecast

    def _work_left(self) -> dict[str, JobWork]:
        work = {
            job.name: JobWork(
                job.waiting,
                job.tokens_to_start,
                job.estimator.predicted_tokens,
                job.estimator.long_tokens,
                job.is_known,
            )
            for job in self.jobs
        }
        for request in self._engine.running():
            entry = self._entries.get(request.request_id)
            if entry is not None:
                known = known_tokens(request)
                uncomputed = max(0, known - request.num_computed_tokens - 1)
                output = known - request.num_prompt_tokens
                work[entry.job.name].add_running(known, uncomputed, output, request.max_tokens)
        return work

    # --- the choice -------------------------------------------------------------------------------

    def _choose(self) -> _Entry | None:
        running = len(self._engine.running())
        if not self._waiting or running >= self._engine.max_running:
            return None
        seen = (self._changes, self._engine.free_blocks(), running)
        if not self._running.in_step or seen != self._chosen_in:
            self._choice, self._chosen_in = self._choose_anew(), seen
        return self._choice

    def _choose_anew(self) -> _Entry | None:
        self._running.look()
        size, most = self._engine.block_size, self._engine.max_request_tokens
        budget = self._running.budget_blocks()
        limits = [budget * size]
        if not self._engine.running():
            # Nothing needs the reserve then, and an idle engine must not wait for a margin (P1).
            limits += [self._engine.free_blocks() * size, most]
        for limit in limits:
            for level in self._levels.values():
                entry = self._first_that_fits(level, min(limit, most), budget)
                if entry is not None:
                    return entry
        return None

    def _first_that_fits(self, level: _Level, limit_tokens: int, budget: int) -> _Entry | None:
        for entry in level.preempted.values():
            request = entry.request
            need = charged_tokens(request.num_tokens - request.num_computed_tokens, entry.job.shared_tokens)
            fits = need <= limit_tokens and request.num_tokens <= self._engine.max_request_tokens
            if fits and need <= self._room(entry, need):
                return entry
        for entry in level.probes.values():
            need = charged_tokens(entry.need_tokens, entry.job.shared_tokens)
            if need <= limit_tokens and entry.job.is_probing and need <= self._room(entry, need):
                return entry
        for of_job in self._jobs_in_order(level, budget):
            shortest, longest = of_job[0], of_job[-1]
            shared = shortest.job.shared_tokens
            if charged_tokens(shortest.need_tokens, shared) <= limit_tokens:
                most = min(charged_tokens(longest.need_tokens, shared), limit_tokens)
                within = min(most, self._room(longest, most))
                # One token is charged for however much is shared.
                need = within + shared if within > 0 else within
                fitting = self._of_need(of_job, need)
                if fitting:
                    chosen: _Entry = of_job[min(fitting, self._in_turn(of_job)) - 1]
                    return chosen
        return None

    @staticmethod
    def _of_need(of_job: SortedKeyList[_Entry, int], tokens: int) -> int:
        """How many of a job's requests need so many tokens at most; the last of them arrived first."""
        return of_job.bisect_key_right(tokens * _MOST_ARRIVALS)

    def _in_turn(self, of_job: SortedKeyList[_Entry, int]) -> int:
        """How many of a job's requests need no more than the one whose turn it is (O5, O5c)."""
        if self._turns is None:
            return len(of_job)
        entry: _Entry = of_job[place_in_turn(of_job[0].job.started, len(of_job))]
        return self._of_need(of_job, entry.need_tokens)

    def _room(self, entry: _Entry, enough: int) -> int:
        """The tokens that a request may need, for the predicted peak to stay within the pool (V5, P4).

        For what waits and was not preempted it is the same throughout a job. It may be told as less than
        it is if it is ``enough``.
        """
        if not self._engine.running() or not (self._config.look_ahead or entry in self._just_preempted):
            return self._engine.max_request_tokens
        return self._running.room_tokens(self._remaining(entry), enough)

    def _jobs_in_order(self, level: _Level, budget: int) -> Iterator[SortedKeyList[_Entry, int]]:
        if self._turns is not None:
            jobs = [self.jobs.placed(name) for name in level.by_job]
            for job in self._turns.order(jobs, self.forecast(), self._engine):
                yield level.by_job[job.name]
            return
        free_tokens = budget * self._engine.block_size
        long_first = free_tokens > self._config.low_available_tokens_threshold
        threshold = self._config.short_decode_token_threshold
        for job in self.jobs.longest_first(threshold, long_first=long_first):
            of_job = level.by_job.get(job.name)
            if of_job is not None:
                yield of_job

    def _remaining(self, entry: _Entry) -> int:
        """What a waiting request is predicted to decode within the look-ahead."""
        if entry.preempted_at is not None:
            return within_look_ahead(self._end_of(entry.request), known_tokens(entry.request))
        estimator = entry.job.estimator
        return (
            within_look_ahead(estimator.predicted_tokens, 0) if estimator.observations else LOOK_AHEAD_TOKENS
        )

    def _end_of(self, request: Request) -> int:
        """With how many tokens a request that has started ends; one of an unknown job goes on to its cap."""
        of_request = self._ends.get(request.request_id) or self._remember_ends(request)
        if of_request is None:
            return maxsize
        estimator, prompt, least, most = of_request
        end = prompt + estimator.predicted_tokens if estimator.observations else most
        # Every running request comes by here in each step, most of them within their limits.
        return end if least <= end <= most else held_between(end, least, most)

    def _remember_ends(self, request: Request) -> _Ends | None:
        entry = self._entries.get(request.request_id)
        if entry is None:
            return None
        prompt = request.num_prompt_tokens
        at_least = getattr(request.sampling_params, "min_tokens", 0) or 0
        ends = (
            entry.job.estimator,
            prompt,
            prompt + held_between(0, at_least, request.max_tokens),
            prompt + request.max_tokens,
        )
        # The next turn of a session may be longer.
        if entry.runs and not getattr(request, "resumable", False):
            self._ends[request.request_id] = ends
        return ends

    # --- bookkeeping ------------------------------------------------------------------------------

    def _known(self, request: Request) -> _Entry:
        entry = self._entries.get(request.request_id)
        if entry is not None and entry.request is not request:
            # The ID is used again, so the end of the former request was not reported.
            self._end(entry)
            entry = None
        return self._new_entry(request) if entry is None else entry

    def _new_entry(self, request: Request) -> _Entry:
        name = job_name(request)
        job = self.jobs.arrive(name)
        priority = request.priority if self._priority_policy else 0
        entry = _Entry(request, name, self._arrivals, priority)
        entry.arrive_at(job)
        self._arrivals += 1
        self._entries[request.request_id] = entry
        if job.name != name:  # it shares the default job's place
            self._displaced.setdefault(name, set()).add(entry)
        return entry

    def _put_in(self, entry: _Entry) -> None:
        request = entry.request
        self._changes += 1
        self._count_running(entry, False)
        entry.waiting = True
        need = request.num_tokens - request.num_computed_tokens
        entry.need_tokens = need
        self._waiting += 1
        if entry.preempted_at is not None:
            self._preempted[request.request_id] = entry
        elif request.num_tokens > self._engine.max_request_tokens:
            self._too_large[request.request_id] = entry
            return
        level = self._levels.get(entry.priority)
        if level is None:
            level = self._levels[entry.priority] = _Level()
        job = entry.job
        if self._turns is not None and not job.waiting:
            self._turns.join(job)
        job.count_waiting(1, need)
        level.insert(entry, job)

    def _take_out(self, entry: _Entry) -> None:
        if self._offered is entry:
            self._offered = None
        self._changes += 1
        entry.waiting = False
        self._waiting -= 1
        if self._too_large.pop(entry.request.request_id, None) is not None:
            return
        self._preempted.pop(entry.request.request_id, None)
        level = self._levels[entry.priority]
        job = entry.job
        job.count_waiting(-1, -entry.need_tokens)
        level.discard(entry, job)
        if not level:
            del self._levels[entry.priority]

    def _note_preemption(self, entry: _Entry) -> None:
        entry.num_preemptions = entry.request.num_preemptions
        entry.preempted_at = self._preemptions
        self._just_preempted.add(entry)
        self._preemptions += 1
        entry.job.preemptions += 1

    def _count_running(self, entry: _Entry, runs: bool) -> None:
        if runs != entry.runs:
            entry.job.running += runs - entry.runs
            self._ends.pop(entry.request.request_id, None)
            entry.runs = runs

    def _count_started(self, entry: _Entry) -> None:
        if self._turns is not None and entry.preempted_at is None:
            self._strides[entry] = self._turns.take(entry.job, self.forecast())
        entry.counted_as_started = not entry.started
        if not entry.started:
            entry.started = True
            entry.job.started += 1

    def _uncount_started(self, entry: _Entry) -> None:
        entry.job.turn -= self._strides.pop(entry, 0.0)
        if entry.counted_as_started:
            entry.started = entry.counted_as_started = False
            job = entry.job
            job.started = max(0, job.started - 1)

    def _end(self, entry: _Entry) -> None:
        if entry.waiting:
            self._take_out(entry)
        self._count_running(entry, False)
        del self._entries[entry.request.request_id]
        entry.job.finished += 1
        displaced = self._displaced.get(entry.job_name)
        if displaced is not None:
            displaced.discard(entry)
            if not displaced:
                del self._displaced[entry.job_name]
        self._just_preempted.clear()
        self._strides.pop(entry, None)
        self._changes += 1
        for name in self.jobs.leave(entry.job_name):
            self._move_in(name)

    def _move_in(self, name: str) -> None:
        """A displaced job got its place: its requests count as its first ones, in their order."""
        job, shared = self.jobs.placed(name), self.jobs.placed(DEFAULT_JOB)
        for entry in sorted(self._displaced.pop(name, ()), key=_by_arrival):
            in_level = entry.waiting and entry.request.request_id not in self._too_large
            if in_level:
                self._levels[entry.priority].discard(entry, shared)
                shared.count_waiting(-1, -entry.need_tokens)
                job.count_waiting(1, entry.need_tokens)
            entry.arrive_at(job)
            job.started += entry.started
            shared.running -= entry.runs
            self._ends.pop(entry.request.request_id, None)
            job.running += entry.runs
            if in_level:
                self._levels[entry.priority].insert(entry, job)

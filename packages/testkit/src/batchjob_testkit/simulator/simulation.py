"""Runs a scenario on an engine in virtual time, checks what comes out, and says what it took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from batchjob_testkit.engines import MAX_IDLE_STEPS, NoProgressError, Outcome, sampled_token
from batchjob_testkit.simulator.bound import lower_bound_seconds, work
from batchjob_testkit.simulator.profiles import TIMINGS, DeviceProfile, Timing
from batchjob_testkit.simulator.scenario import Scenario
from batchjob_testkit.workloads import WorkloadRequest

TAIL_SHARE: Final = 0.95
"""The tail begins when so many of the requests are done."""

# A schedule that takes so many times the least number of steps recomputes for ever.
_MAX_STEPS_OVER_BOUND: Final = 100
_MAX_SHORT_STEPS: Final = 10_000


class SimulatedEngine(Protocol):
    """What a backend makes: an engine core that pretends to compute, and can be measured."""

    @property
    def requests(self) -> Mapping[str, Any]:
        """Each request, with its ``num_computed_tokens`` and ``num_preemptions``."""

    @property
    def answers(self) -> list[tuple[str, Outcome]]:
        """Each answer given, in order, as the request's ID and how it ended."""

    @property
    def scheduler_seconds(self) -> float:
        """The CPU time spent in the scheduler so far."""

    @property
    def used_blocks(self) -> int:
        """The blocks held while the last step computed."""

    def submit_request(self, request_id: str, request: WorkloadRequest, max_tokens: int) -> None:
        """A request arrives."""

    def step(self) -> dict[str, int]:
        """One step; returns the tokens that it scheduled per request."""

    def follow(self, clock: Callable[[], float]) -> bool:
        """Let the scheduler read the virtual clock; False if it reads none."""

    def describe(self) -> str:
        """What runs, what waits and what is free, in one line."""

    def check_integrity(self) -> None:
        """After all requests have ended, no block is held; else AssertionError."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of the engine while a step computed."""

    seconds: float
    """When the step ended."""
    kv_use: float
    running: Mapping[str, int]
    """The requests that the step computed for, by job."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run took."""

    scenario: str
    timing: Timing
    makespan_seconds: float
    bound_seconds: float
    steps: int
    scheduled_tokens: int
    output_tokens: int
    preemptions: int
    recomputed_tokens: int
    kv_use: float
    """The share of the KV cache that is held, in the mean over time."""
    tail_seconds: float
    """From the end of 95 % of the requests to the end of the last."""
    job_finish_seconds: dict[str, float]
    scheduler_seconds: float
    """CPU time in the scheduler, on the machine that simulates."""
    moments: list[Moment] = field(default_factory=list, repr=False, compare=False)

    @property
    def ratio_to_bound(self) -> float:
        """1 would be a perfect schedule, if one exists."""
        return self.makespan_seconds / self.bound_seconds

    @property
    def output_tokens_per_second(self) -> float:
        """The throughput that a user sees."""
        return self.output_tokens / self.makespan_seconds

    @property
    def tokens_per_step(self) -> float:
        """Prefill and decode together."""
        return self.scheduled_tokens / self.steps

    @property
    def scheduler_ms_per_step(self) -> float:
        """CPU time."""
        return 1000 * self.scheduler_seconds / self.steps


def simulate(
    make_engine: Callable[[Scenario], SimulatedEngine],
    scenario: Scenario,
    profile: DeviceProfile,
    *,
    timings: Sequence[Timing] = TIMINGS,
    keep_moments: bool = False,
) -> dict[Timing, Result]:
    """Run a scenario to its end, once per timing, or only once where time changes nothing.

    Raises:
        NoProgressError: with the state, if the engine stops to make progress.
        AssertionError: if a request is not answered once and in full, or a block is still held.
    """
    results: dict[Timing, Result] = {}
    for timing in timings:
        if timing not in results:
            run = _Run(make_engine(scenario), scenario, profile, keep_moments=keep_moments)
            results |= run.to_its_end(timing, [other for other in timings if other not in results])
    return results


class _Meter:
    """Adds up what a run takes under one timing."""

    def __init__(self, profile: DeviceProfile, timing: Timing) -> None:
        self.timing = timing
        self.now = 0.0
        self.kv_use_seconds = 0.0
        self.finish_seconds: list[float] = []
        self.job_finish_seconds: dict[str, float] = {}
        self.moments: list[Moment] = []
        self._profile = profile

    def advance(self, tokens: int, context_tokens: int, kv_use: float) -> None:
        seconds = self._profile.overhead_seconds
        if tokens:
            seconds = self._profile.step_seconds(self.timing, tokens, context_tokens)
        self.now += seconds
        self.kv_use_seconds += kv_use * seconds

    def note_ends(self, jobs: Iterable[str]) -> None:
        for job in jobs:
            self.finish_seconds.append(self.now)
            self.job_finish_seconds[job] = self.now

    @property
    def tail_seconds(self) -> float:
        done = int(TAIL_SHARE * (len(self.finish_seconds) - 1))
        return self.finish_seconds[-1] - self.finish_seconds[done]


class _Run:
    """A scenario on its way through an engine."""

    def __init__(
        self, engine: SimulatedEngine, scenario: Scenario, profile: DeviceProfile, *, keep_moments: bool
    ) -> None:
        self._engine = engine
        self._scenario = scenario
        self._profile = profile
        self._keep_moments = keep_moments
        self._requests: dict[str, WorkloadRequest] = {}
        self._meters: list[_Meter] = []
        self._answered = 0
        self._steps = 0
        self._scheduled_tokens = 0
        self._recomputed_tokens = 0
        self._furthest: Counter[str] = Counter()
        least_steps = max(work(scenario).steps.values())
        self._most_steps = _MAX_STEPS_OVER_BOUND * least_steps + _MAX_SHORT_STEPS

    def to_its_end(self, timing: Timing, others: Iterable[Timing]) -> dict[Timing, Result]:
        clock = _Meter(self._profile, timing)
        self._meters = [clock]
        depends_on_time = self._engine.follow(lambda: clock.now)
        if not depends_on_time and self._scenario.arrivals_per_second is None:
            self._meters += [_Meter(self._profile, other) for other in others if other != timing]
        idle = 0
        while self._answered < len(self._scenario.requests):
            self._let_arrive()
            idle = 0 if self._step() else idle + 1
            self._refuse_to_wait_for_ever(idle)
        self._check_answers()
        self._engine.check_integrity()
        return {meter.timing: self._result(meter) for meter in self._meters}

    def _let_arrive(self) -> None:
        """What has arrived by now, and if nothing is left to do, the next one, for which time passes."""
        scenario, clock = self._scenario, self._meters[0]
        while (number := len(self._requests)) < len(scenario.requests):
            if scenario.arrival_seconds(number) > clock.now:
                if self._answered < number:
                    return
                clock.now = scenario.arrival_seconds(number)
            request = scenario.requests[number]
            name = request.request_id(number)
            self._requests[name] = request
            self._engine.submit_request(name, request, scenario.workload.max_tokens_of(request))

    def _step(self) -> bool:
        scheduled = self._engine.step()
        kv_use = self._engine.used_blocks / self._scenario.limits.usable_blocks
        context_tokens = 0
        for name, tokens in scheduled.items():
            computed = self._engine.requests[name].num_computed_tokens
            context_tokens += computed
            furthest = self._furthest[name]
            if furthest < computed:
                self._furthest[name] = computed
            self._recomputed_tokens += max(0, min(computed, furthest) - (computed - tokens))
        tokens = sum(scheduled.values())
        self._steps += bool(tokens)
        self._scheduled_tokens += tokens
        ended = [self._requests[name].job for name, _ in self._engine.answers[self._answered :]]
        self._answered += len(ended)
        for meter in self._meters:
            meter.advance(tokens, context_tokens, kv_use)
            meter.note_ends(ended)
            if self._keep_moments:
                running = Counter(self._requests[name].job for name in scheduled)
                meter.moments.append(Moment(meter.now, kv_use, running))
        return bool(scheduled)

    def _refuse_to_wait_for_ever(self, idle: int) -> None:
        waits_for_arrivals = len(self._requests) < len(self._scenario.requests)
        if (idle > MAX_IDLE_STEPS and not waits_for_arrivals) or self._steps + idle > self._most_steps:
            raise NoProgressError(
                f"{self._scenario.name}: {self._answered} of {len(self._scenario.requests)} requests are "
                f"answered after {self._steps} steps, {idle} idle ones since; {self._engine.describe()}"
            )

    def _check_answers(self) -> None:
        names = Counter(name for name, _ in self._engine.answers)
        wrong = {name: names[name] for name in self._requests | names if names[name] != 1}
        assert not wrong, f"each request is answered once, but so often: {wrong}"
        for name, outcome in self._engine.answers:
            request = self._requests[name]
            reason = request.finish_reason
            last = request.output_tokens if reason == "stop" else request.output_tokens + 1
            tokens = tuple(sampled_token(n + 1, last) for n in range(request.output_tokens))
            assert outcome.finish_reason == reason, f"{name} ends by {outcome.finish_reason}, not {reason}"
            assert outcome.tokens == tokens, f"{name} is answered {outcome.tokens}, not {tokens}"

    def _result(self, meter: _Meter) -> Result:
        return Result(
            scenario=self._scenario.name,
            timing=meter.timing,
            makespan_seconds=meter.finish_seconds[-1],
            bound_seconds=lower_bound_seconds(self._scenario, self._profile, meter.timing),
            steps=self._steps,
            scheduled_tokens=self._scheduled_tokens,
            output_tokens=sum(request.output_tokens for request in self._scenario.requests),
            preemptions=sum(request.num_preemptions for request in self._engine.requests.values()),
            recomputed_tokens=self._recomputed_tokens,
            kv_use=meter.kv_use_seconds / meter.now,
            tail_seconds=meter.tail_seconds,
            job_finish_seconds=meter.job_finish_seconds,
            scheduler_seconds=self._engine.scheduler_seconds,
            moments=meter.moments,
        )


def decode_tokens(request: WorkloadRequest) -> int:
    """After how many tokens a request would stop, which one that ends by its length cap never reaches."""
    return request.output_tokens + (request.finish_reason == "length")

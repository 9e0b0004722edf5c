"""What is left of the batch, from what each job has decoded so far.

A heuristic inside what the rules leave free: it shapes steps and blends jobs, and decides nothing that a
rule decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from batchjob_scheduler.engine_view import EngineView

FULL_STEP_TOKENS: Final = 150
"""With fewer tokens a step is bound by reading the weights, on the accelerators of today."""

CRITICAL_SHARE: Final = 0.9
"""A job is critical if its own path takes at least this share of the steps that are left."""

_MOSTLY_FILLED: Final = 0.75
"""Steps of this share of a full one are worth it that all jobs take turns."""

_BEYOND_LONG: Final = 0.3
"""What a request that has outlasted all expectation still decodes, as a share of what it has decoded."""


@dataclass(slots=True)
class JobWork:
    """What is left of one job: requests, tokens to prefill, and how long its requests decode."""

    waiting: int
    waiting_tokens: int
    mean_tokens: int
    long_tokens: int
    """What few requests of the job decode more than."""
    is_known: bool = True
    """Whether one of its requests has ended; how long they decode is a guess before."""
    prefill_tokens: int = field(init=False)
    decode_tokens: float = field(init=False)
    kv_token_steps: float = field(init=False)
    running: int = field(init=False, default=0)
    longest_steps: float = field(init=False, default=0.0)
    """What the longest running request still takes."""

    def __post_init__(self) -> None:
        self.prefill_tokens = self.waiting_tokens
        self.decode_tokens = float(self.waiting * self.mean_tokens)
        mean = self.mean_tokens
        self.kv_token_steps = self.waiting_tokens * mean + self.decode_tokens * mean / 2

    def add_running(self, known: int, uncomputed: int, output: int, max_tokens: int) -> None:
        """A running request, in tokens: all known, what of that is not computed, and output with its cap."""
        self.running += 1
        cap = max_tokens - output
        remaining = max(1, min(self.mean_tokens - output, cap))
        self.prefill_tokens += uncomputed
        self.decode_tokens += remaining
        self.kv_token_steps += remaining * (known + remaining / 2)
        longest = self.long_tokens - output if output < self.long_tokens else _BEYOND_LONG * output
        self.longest_steps = max(self.longest_steps, min(longest, cap))


@dataclass(frozen=True)
class Forecast:
    """Predicted for the rest of the batch, from the work that is left of each job."""

    work: Mapping[str, JobWork]
    steps: float
    """Steps until the last request ends, at least 1."""
    decode_tokens: float
    """Tokens that all requests still decode."""
    kv_token_steps: float
    """Tokens held, summed over the steps."""
    concurrency: float
    """Requests that run side by side while slots, or the KV cache, are what is short."""
    path_steps: Mapping[str, float]
    """For each job the steps until its last request ends, were it alone in the engine."""

    def is_critical(self, job: str) -> bool:
        """Whether every delay of the job delays the end of the batch."""
        return self.path_steps.get(job, 0.0) >= CRITICAL_SHARE * self.steps

    @cached_property
    def is_known(self) -> bool:
        """Whether of each job of which something is left a request has ended."""
        return all(work.is_known for work in self.work.values() if work.waiting or work.running)

    @cached_property
    def tokens_held(self) -> float:
        """What a request holds while it decodes, on average, in tokens; at least 1."""
        return max(1.0, self.kv_token_steps / max(1.0, self.decode_tokens))

    @cached_property
    def mean_decode_tokens(self) -> float:
        """What a request, be it waiting or running, still decodes, on average."""
        return self.decode_tokens / max(1, sum(work.waiting + work.running for work in self.work.values()))

    @cached_property
    def prefill_tokens(self) -> int:
        """What all requests still have to compute before they decode."""
        return sum(work.prefill_tokens for work in self.work.values())

    @cached_property
    def mean_waiting_tokens(self) -> float:
        """What a waiting request has to compute before it decodes, on average; at least 1."""
        waiting = sum(work.waiting for work in self.work.values())
        return max(1.0, sum(work.waiting_tokens for work in self.work.values()) / max(1, waiting))

    @cached_property
    def critical_waiting(self) -> tuple[int, int]:
        """The waiting requests of critical jobs, and the tokens that they have to compute."""
        critical = [work for name, work in self.work.items() if work.waiting and self.is_critical(name)]
        return sum(work.waiting for work in critical), sum(work.waiting_tokens for work in critical)

    def fitting_requests(self, engine: EngineView) -> float:
        """For how many more requests of critical jobs there are slots and blocks, if any wait."""
        waiting, waiting_tokens = self.critical_waiting
        held_by_each = max(self.tokens_held, waiting_tokens / max(1, waiting))
        slots = engine.max_running - len(engine.running())
        return min(slots, engine.free_blocks() * engine.block_size / held_by_each)

    def all_critical_fits(self, engine: EngineView) -> bool:
        """Whether critical work waits, and all of it could start now."""
        waiting = self.critical_waiting[0]
        return waiting > 0 and self.fitting_requests(engine) >= waiting

    @cached_property
    def is_thin(self) -> bool:
        """Whether decodes alone leave a step room, most of which prefill that can wait would fill."""
        can_wait = sum(work.waiting_tokens for name, work in self.work.items() if not self.is_critical(name))
        filled = (self.decode_tokens + can_wait) / self.steps
        return self.concurrency < FULL_STEP_TOKENS and filled >= _MOSTLY_FILLED * FULL_STEP_TOKENS


def forecast(jobs: Mapping[str, JobWork], slots: int, pool_tokens: int) -> Forecast:
    """The rest of a batch in an engine of ``slots`` requests at a time and ``pool_tokens`` of KV cache.

    Work is spread over all slots or all of the pool, whichever takes longer. After a job's last request
    has started, a long one may still take all of its steps.

    >>> news = JobWork(waiting=4, waiting_tokens=400, mean_tokens=50, long_tokens=80)
    >>> left = forecast({"news": news}, slots=2, pool_tokens=1000)
    >>> left.steps, left.decode_tokens          # 4 * 50 tokens over 2 slots, and a long one
    (180.0, 200.0)
    """
    decode_tokens = kv_token_steps = 0.0
    path_steps: dict[str, float] = {}
    for name, work in jobs.items():
        decode_tokens += work.decode_tokens
        kv_token_steps += work.kv_token_steps
        path_steps[name] = work.longest_steps
        if work.waiting:
            spread = max(work.decode_tokens / slots, work.kv_token_steps / max(1, pool_tokens))
            path_steps[name] = max(work.longest_steps, spread + work.long_tokens)
    full_steps = max(1.0, decode_tokens / slots, kv_token_steps / max(1, pool_tokens))
    return Forecast(
        work=jobs,
        steps=max([full_steps, *path_steps.values()]),
        decode_tokens=decode_tokens,
        kv_token_steps=kv_token_steps,
        concurrency=decode_tokens / full_steps,
        path_steps=path_steps,
    )

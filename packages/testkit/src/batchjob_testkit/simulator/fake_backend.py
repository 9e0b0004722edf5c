"""The fake engine core as the simulator's engine, for machines without vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchjob_spec.queue import Settings
from batchjob_testkit.fakes import FakeEngine, FakeEngineCore, FCFSQueue
from batchjob_testkit.simulator.scenario import Scenario
from batchjob_testkit.simulator.simulation import decode_tokens
from batchjob_testkit.workloads import WorkloadRequest

if TYPE_CHECKING:
    from batchjob_testkit.queues import RequestQueue


@dataclass(frozen=True)
class FakeBackend:
    """Makes engines over a waiting queue; see :class:`batchjob_testkit.fakes.FakeEngineCore`."""

    make_queue: Callable[[FakeEngine, Settings, bool], RequestQueue] = FCFSQueue
    settings: Settings | None = None

    def __call__(self, scenario: Scenario) -> FakeSimulatedEngine:
        """An engine for the scenario.

        Raises:
            ValueError: if the scenario wants a prefix cache, which this engine has not.
        """
        if scenario.enable_prefix_caching:
            raise ValueError("enable_prefix_caching is True, allowed: False on the fake engine")
        core = FakeEngineCore(self.make_queue, scenario.limits, self.settings)
        return FakeSimulatedEngine(core)


class FakeSimulatedEngine:
    """A fake engine core that is measured. Its scheduler's CPU time is that of the whole step."""

    def __init__(self, core: FakeEngineCore) -> None:
        self._core = core
        self.requests = core.requests
        self.answers = core.answers
        self.scheduler_seconds = 0.0
        self.used_blocks = 0

    def submit_request(self, request_id: str, request: WorkloadRequest, max_tokens: int) -> None:
        """A request arrives."""
        self._core.submit(
            request_id,
            request.prompt_tokens,
            decode_tokens(request),
            max_tokens=max_tokens,
            priority=request.priority,
        )

    def step(self) -> dict[str, int]:
        """One step; returns the tokens that it scheduled per request."""
        start = time.thread_time()
        scheduled = self._core.step()
        self.scheduler_seconds += time.thread_time() - start
        self.used_blocks = self._core.used_blocks[-1]
        # A simulation is long, and nobody asks what it did at each step.
        self._core.steps.clear()
        self._core.used_blocks.clear()
        return scheduled

    def follow(self, clock: Callable[[], float]) -> bool:  # noqa: ARG002 - a queue reads no clock
        """No waiting queue reads the time."""
        return False

    def describe(self) -> str:
        """What runs, what waits and what is free, in one line."""
        return self._core.describe()

    def check_integrity(self) -> None:
        """After all requests have ended, no block is held; else AssertionError."""
        self._core.engine.check_integrity()
        free, usable = self._core.num_free_blocks, self._core.limits.usable_blocks
        assert free == usable, f"{free} of {usable} blocks are free"

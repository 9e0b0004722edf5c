"""vLLM's real scheduler and KV cache manager as the simulator's engine. Needs vLLM."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from pkgutil import resolve_name
from typing import Any, Final

from vllm.v1.core.sched.interface import SchedulerInterface

from batchjob_testkit.engines import Outcome
from batchjob_testkit.simulator.scenario import Scenario
from batchjob_testkit.simulator.simulation import decode_tokens
from batchjob_testkit.vllm_scheduler import EngineOptions, VirtualEngine
from batchjob_testkit.workloads import WorkloadRequest

VLLM_SCHEDULER: Final = "vllm.v1.core.sched.scheduler.Scheduler"
"""What vLLM runs by default: first come, first served."""


class SchedulerClassError(ValueError):
    """A dotted name leads to no scheduler; the message says the name and what is allowed."""


def scheduler_class(dotted_name: str) -> type[Any]:
    """The scheduler class of that dotted name.

    Raises:
        SchedulerClassError: if it cannot be imported or is no scheduler.
    """
    try:
        found = resolve_name(dotted_name)
    except (ValueError, ImportError, AttributeError) as error:
        raise SchedulerClassError(
            f"scheduler: got {dotted_name!r}, which cannot be imported ({error}), "
            f"allowed: the dotted name of a scheduler class"
        ) from None
    if not (inspect.isclass(found) and issubclass(found, SchedulerInterface)):
        raise SchedulerClassError(
            f"scheduler: got {dotted_name!r}, which is {found!r}, "
            f"allowed: a subclass of vLLM's SchedulerInterface"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class VllmBackend:
    """Makes engines with a scheduler class and vLLM's options for it."""

    scheduler: str = VLLM_SCHEDULER
    policy: str = "fcfs"
    max_num_batched_tokens: int | None = None
    """The token budget of a step; None is that of the scenario."""
    async_scheduling: bool = False
    """Each step is scheduled before the last one's tokens are known; the class must be made for it."""
    scheduler_config: Mapping[str, Any] = field(default_factory=dict)
    additional_config: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, scenario: Scenario) -> VllmSimulatedEngine:
        """An engine for the scenario.

        Raises:
            SchedulerClassError: if the class cannot be imported or is no scheduler.
        """
        limits = replace(scenario.limits, policy=self.policy)
        if self.max_num_batched_tokens is not None:
            limits = replace(limits, max_num_batched_tokens=self.max_num_batched_tokens)
        options = EngineOptions(
            **vars(limits),
            async_scheduling=self.async_scheduling,
            enable_prefix_caching=scenario.enable_prefix_caching,
            scheduler_config=dict(self.scheduler_config),
            additional_config=dict(self.additional_config),
        )
        return VllmSimulatedEngine(VirtualEngine(scheduler_class(self.scheduler), options))


class VllmSimulatedEngine:
    """A virtual engine around vLLM's scheduler that is measured."""

    def __init__(self, engine: VirtualEngine) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self.requests = engine.requests
        self.answers: list[tuple[str, Outcome]] = engine.answers
        self.scheduler_seconds = 0.0
        self.used_blocks = 0
        self._prefix_tokens: dict[str, int] = {}
        for name in ("schedule", "update_from_output"):
            setattr(self._scheduler, name, self._measured(getattr(self._scheduler, name)))

    def submit_request(self, request_id: str, request: WorkloadRequest, max_tokens: int) -> None:
        """A request arrives."""
        # No two requests share a token, but for the prefix that those of a job share.
        of_job = self._prefix_tokens.setdefault(request.job, 2 * len(self._prefix_tokens))
        own = 2 * len(self.requests) + 1
        prompt = [of_job] * request.prefix_tokens + [own] * (request.prompt_tokens - request.prefix_tokens)
        self._engine.submit(
            request_id, prompt, decode_tokens(request), max_tokens=max_tokens, priority=request.priority
        )

    def step(self) -> dict[str, int]:
        """One step; returns the tokens that it scheduled per request."""
        scheduled = self._engine.step()
        # A simulation is long, and nobody asks what it did at each step.
        self._engine.steps.clear()
        return scheduled

    def follow(self, clock: Callable[[], float]) -> bool:
        """Let a scheduler that reads a ``clock`` read the virtual one."""
        if not hasattr(self._scheduler, "clock"):
            return False
        self._scheduler.clock = clock
        return True

    def describe(self) -> str:
        """What runs, what waits and what is free, in one line."""
        return self._engine.describe()

    def check_integrity(self) -> None:
        """After all requests have ended, no block is held; else AssertionError."""
        self._engine.run()
        self._engine.check_integrity()

    def _measured(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def measured(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = method(*args, **kwargs)
            self.scheduler_seconds += time.thread_time() - start
            if method.__name__ == "schedule":
                self.used_blocks = self._engine.options.usable_blocks - self._engine.num_free_blocks
            return result

        return measured

"""A lower bound on the makespan of any schedule; docs/explanation/lower-bound.md derives it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from batchjob_testkit.simulator.profiles import DeviceProfile, Timing
from batchjob_testkit.simulator.scenario import Scenario
from batchjob_testkit.workloads import WorkloadRequest


@dataclass(frozen=True, slots=True)
class Work:
    """What requests cost at least on an engine, whatever the schedule."""

    steps: dict[str, int]
    """The least number of steps, for each reason."""
    tokens: int
    """Tokens computed."""
    context_tokens: int
    """Tokens whose KV cache is read."""

    def seconds(self, profile: DeviceProfile, timing: Timing) -> float:
        """The least time that it takes."""
        return profile.seconds(timing, max(self.steps.values()), self.tokens, self.context_tokens)


def work(scenario: Scenario) -> Work:
    """What a scenario costs at least; what a job's prompts share, it computes once."""
    prefixes: dict[str, int] = {}
    for request in scenario.requests:
        prefixes[request.job] = max(scenario.shared_tokens(request), prefixes.get(request.job, 0))
    return _work(scenario, scenario.requests, sum(prefixes.values()))


def _work(scenario: Scenario, chosen: Sequence[WorkloadRequest], prefix_tokens: int) -> Work:
    limits = scenario.limits
    shared = [scenario.shared_tokens(request) for request in chosen]
    computed = prefix_tokens
    area = 0
    longest = 0
    for request, tokens in zip(chosen, shared, strict=True):
        prefill = request.prompt_tokens - tokens
        computed += prefill + request.output_tokens - 1
        area += block_steps(request, limits.block_size) - tokens // limits.block_size * request.output_tokens
        prefill_steps = math.ceil(prefill / limits.max_num_batched_tokens)
        longest = max(longest, prefill_steps + request.output_tokens - 1)
    steps = {
        "longest request": longest,
        "slots": math.ceil(sum(request.output_tokens for request in chosen) / limits.max_num_seqs),
        "KV cache": math.ceil(area / limits.usable_blocks),
        "token budget": math.ceil(computed / limits.max_num_batched_tokens),
    }
    return Work(steps, computed, sum(map(context_tokens, chosen)))


def lower_bound_seconds(scenario: Scenario, profile: DeviceProfile, timing: Timing) -> float:
    """No schedule ends the batch sooner.

    A batch that trickles in takes, besides, each arrival and that request alone after it.
    """
    together = work(scenario).seconds(profile, timing)
    if scenario.arrivals_per_second is None:
        return together
    alone = (
        scenario.arrival_seconds(number) + _work(scenario, [request], 0).seconds(profile, timing)
        for number, request in enumerate(scenario.requests)
    )
    return max(together, *alone)


def context_tokens(request: WorkloadRequest) -> int:
    """What attention reads for a request: its prompt once, then for each token all before and itself.

    >>> context_tokens(WorkloadRequest("news", prompt_tokens=10, output_tokens=3))  # 10 + 11 + 12
    33
    """
    steps = request.output_tokens
    return steps * request.prompt_tokens + steps * (steps - 1) // 2


def block_steps(request: WorkloadRequest, block_size: int) -> int:
    """The blocks that a request holds, summed over its steps.

    >>> block_steps(WorkloadRequest("news", prompt_tokens=15, output_tokens=4), 16)  # 1 + 1 + 2 + 2
    6
    """
    stored = request.prompt_tokens + request.output_tokens - 1
    return _blocks_up_to(stored, block_size) - _blocks_up_to(request.prompt_tokens - 1, block_size)


def _blocks_up_to(tokens: int, block_size: int) -> int:
    """The blocks of 1, of 2 and so on up to ``tokens`` tokens, summed."""
    full, rest = divmod(tokens, block_size)
    return block_size * full * (full + 1) // 2 + rest * (full + 1)

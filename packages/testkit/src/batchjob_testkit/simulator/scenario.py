"""A batch, the engine that it is sent to, and how it arrives."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from math import log2
from statistics import fmean

from batchjob_testkit.engines import EngineLimits
from batchjob_testkit.workloads import Workload, WorkloadRequest


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The requests of ``workload``, sent to an engine of ``limits`` in their order.

    All are there at the start, or ``arrivals_per_second`` of them come each second.

    Raises:
        ValueError: if no engine of these limits can serve a request.
    """

    name: str
    workload: Workload
    limits: EngineLimits = field(default_factory=EngineLimits)
    enable_prefix_caching: bool = False
    arrivals_per_second: float | None = None

    def __post_init__(self) -> None:
        if self.workload.max_model_len != self.limits.max_model_len:
            raise ValueError(
                f"max_model_len of the workload is {self.workload.max_model_len}, "
                f"allowed: that of the engine, {self.limits.max_model_len}"
            )
        if self.arrivals_per_second is not None and not self.arrivals_per_second > 0:
            raise ValueError(f"arrivals_per_second is {self.arrivals_per_second}, allowed: above 0")
        tokens = self.limits.usable_blocks * self.limits.block_size
        for number, request in enumerate(self.requests):
            # The last token of output is never stored.
            stored = request.prompt_tokens + request.output_tokens - 1
            if stored > tokens:
                raise ValueError(
                    f"request {number} of job {request.job!r}: stores {stored} tokens, "
                    f"allowed: up to the {tokens} of the KV cache"
                )

    @property
    def requests(self) -> tuple[WorkloadRequest, ...]:
        """The requests in the order of their arrival."""
        return self.workload.requests

    def arrival_seconds(self, number: int) -> float:
        """When a request arrives."""
        return number / self.arrivals_per_second if self.arrivals_per_second else 0.0

    def shared_tokens(self, request: WorkloadRequest) -> int:
        """The tokens of a prompt that the prefix cache can hold from an earlier one: whole blocks."""
        if not self.enable_prefix_caching:
            return 0
        size = self.limits.block_size
        # One token of a prompt is always computed, since the first of the output is sampled from it.
        return min(request.prefix_tokens, request.prompt_tokens - 1) // size * size

    def with_requests(self, requests: tuple[WorkloadRequest, ...]) -> Scenario:
        """The same with other requests."""
        return replace(self, workload=Workload(self.workload.max_model_len, requests))


def as_given(scenario: Scenario) -> Scenario:
    """The requests as they come."""
    return scenario


def longest_job_first(scenario: Scenario) -> Scenario:
    """The input sorted by what each job decodes in the mean, as who knows the jobs would write it."""
    lengths = defaultdict(list)
    for request in scenario.requests:
        lengths[request.job].append(request.output_tokens)
    means = {job: fmean(tokens) for job, tokens in lengths.items()}
    ordered = sorted(scenario.requests, key=lambda request: -means[request.job])
    return scenario.with_requests(tuple(ordered))


def longest_request_urgent(scenario: Scenario) -> Scenario:
    """Priorities from the true decode lengths, which nobody knows beforehand: the longest goes first."""
    requests = (replace(request, priority=-request.output_tokens) for request in scenario.requests)
    return scenario.with_requests(tuple(requests))


def lengths_told(scenario: Scenario) -> Scenario:
    """What a scheduler that learns per job would know if it knew the future.

    ``max_tokens`` is the true decode length, and requests of almost the same length are a job. Those that
    share a prefix stay in the job that shares it.
    """
    requests = []
    for request in scenario.requests:
        told = replace(request, max_tokens=request.output_tokens)
        if not request.prefix_tokens:
            half_octave = round(2 * log2(request.output_tokens)) / 2
            told = replace(told, job=f"about {2**half_octave:.0f}")
        requests.append(told)
    return scenario.with_requests(tuple(requests))

"""The workloads of the benchmark, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from batchjob_testkit.engines import EngineLimits
from batchjob_testkit.simulator.lengths import TRACES, read_trace
from batchjob_testkit.simulator.profiles import DeviceProfile
from batchjob_testkit.simulator.scenario import Scenario
from batchjob_testkit.workloads import Workload, WorkloadRequest

MAX_MODEL_LEN: Final = 8192

# Job, prompt, and mean, logarithmic deviation and maximum of the output.
_FOUR_JOBS: Final = (
    ("long decode", 300, 2000, 0.6, 6000),
    ("medium", 500, 300, 0.5, 2000),
    ("classification", 400, 8, 0.5, 64),
    ("long prompt", 4000, 60, 0.5, 512),
)


@dataclass(frozen=True, kw_only=True)
class Mix:
    """A kind of workload: its requests, and what is special about the engine that takes them."""

    description: str
    requests: Callable[[int, Random], list[WorkloadRequest]]
    """So many requests, drawn with that generator."""
    pool_share: float = 1.0
    """The share of the device's KV cache that is there."""
    max_num_seqs: int = 256
    enable_prefix_caching: bool = False
    arrivals_per_second: float | None = None

    def scenario(self, name: str, profile: DeviceProfile, *, requests: int, seed: int) -> Scenario:
        """So many of its requests, in random order, on a device."""
        generator = Random(seed)
        drawn = self.requests(requests, generator)
        generator.shuffle(drawn)
        return Scenario(
            name=name,
            workload=Workload(MAX_MODEL_LEN, tuple(drawn)),
            limits=EngineLimits(
                num_blocks=int(profile.num_blocks * self.pool_share) + 1,
                block_size=profile.block_size,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=8192,
                max_model_len=MAX_MODEL_LEN,
            ),
            enable_prefix_caching=self.enable_prefix_caching,
            arrivals_per_second=self.arrivals_per_second,
        )


def log_normal(generator: Random, mean: float, deviation: float, most: int) -> int:
    """A length of that mean, whose logarithm deviates so much, from 1 to ``most``."""
    drawn = generator.lognormvariate(math.log(mean) - deviation**2 / 2, deviation)
    return min(max(1, int(drawn)), most)


def _four_jobs(count: int, generator: Random) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(job, prompt, log_normal(generator, mean, deviation, most))
        for _ in range(math.ceil(count / len(_FOUR_JOBS)))
        for job, prompt, mean, deviation, most in _FOUR_JOBS
    ][:count]


def _four_capped_jobs(count: int, _generator: Random) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(job, prompt, mean, max_tokens=mean)
        for _ in range(math.ceil(count / len(_FOUR_JOBS)))
        for job, prompt, mean, _, _ in _FOUR_JOBS
    ][:count]


def _four_templates(count: int, generator: Random) -> list[WorkloadRequest]:
    """The four jobs, each with a template of 1,000 tokens before its prompts."""
    template = 1000
    return [
        replace(request, prompt_tokens=request.prompt_tokens + template, prefix_tokens=template)
        for request in _four_jobs(count, generator)
    ]


def _many_jobs(count: int, generator: Random) -> list[WorkloadRequest]:
    """24 jobs of prompts from 50 to 4,000 and outputs from 4 to 2,000 tokens in the mean."""
    jobs = [
        (
            f"job {number}",
            int(math.exp(generator.uniform(math.log(50), math.log(4000)))),
            math.exp(generator.uniform(math.log(4), math.log(2000))),
            generator.uniform(0.2, 1.0),
        )
        for number in range(24)
    ]
    drawn = (generator.choice(jobs) for _ in range(count))
    return [
        WorkloadRequest(job, prompt, log_normal(generator, mean, deviation, MAX_MODEL_LEN - prompt))
        for job, prompt, mean, deviation in drawn
    ]


def _untagged(count: int, generator: Random) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(
            "__default__", generator.choice((100, 400, 1500)), log_normal(generator, 600, 1.2, 6000)
        )
        for _ in range(count)
    ]


def _traces(*names: str) -> Callable[[int, Random], list[WorkloadRequest]]:
    def requests(count: int, generator: Random) -> list[WorkloadRequest]:
        share = math.ceil(count / len(names))
        drawn: list[WorkloadRequest] = []
        for name in names:
            trace = read_trace(name)
            whole, rest = divmod(share, len(trace))
            drawn += trace * whole + generator.sample(trace, rest)
        return drawn[:count]

    return requests


MIXES: Final[dict[str, Mix]] = {
    "four-jobs": Mix(description="long and medium decodes, labels, long prompts", requests=_four_jobs),
    "four-jobs-starved": Mix(
        description="the same with a quarter of the KV cache", requests=_four_jobs, pool_share=0.25
    ),
    "four-jobs-trickling": Mix(
        description="the same, 50 requests a second", requests=_four_jobs, arrivals_per_second=50.0
    ),
    "24-jobs": Mix(description="24 jobs of random lengths", requests=_many_jobs),
    "24-jobs-few-slots": Mix(
        description="the same, 32 requests at a time", requests=_many_jobs, max_num_seqs=32
    ),
    "untagged": Mix(description="one job without a name, heavy tail", requests=_untagged),
    "capped": Mix(description="four jobs, each answer ends by its length cap", requests=_four_capped_jobs),
    "templates": Mix(
        description="four jobs with a shared prefix each, prefix cache on",
        requests=_four_templates,
        enable_prefix_caching=True,
    ),
    "templates-starved": Mix(
        description="the same with a quarter of the KV cache",
        requests=_four_templates,
        pool_share=0.25,
        enable_prefix_caching=True,
    ),
    "traces": Mix(description="four public traces, one job each", requests=_traces(*TRACES)),
    **{
        name.replace("_", "-"): Mix(description=f"the public trace {name} alone", requests=_traces(name))
        for name in TRACES
    },
}
"""Each workload by its name."""

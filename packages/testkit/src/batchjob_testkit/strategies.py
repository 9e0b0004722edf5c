"""Hypothesis strategies for jobs, requests, settings, engines, workloads and histories.

The values are small, so that limits are met, and shrink towards few, short requests of one job.
"""

from __future__ import annotations

from hypothesis import strategies as st

from batchjob_spec.blocks import blocks_for
from batchjob_spec.queue import Settings
from batchjob_testkit import events
from batchjob_testkit.batches import Abort, Batch, Event, Steps, Submit
from batchjob_testkit.engines import EngineLimits
from batchjob_testkit.fakes import FakeEngine, FakeRequest, FakeSamplingParams
from batchjob_testkit.workloads import Workload, WorkloadRequest

JOB_NAMES = ("news", "chat", "labels", "code", "__default__")
BLOCK_SIZE = 16

job_names = st.sampled_from(JOB_NAMES)
"""A few names, so that requests share jobs and jobs exceed a small ``max_jobs``."""


@st.composite
def settings(draw: st.DrawFn) -> Settings:
    """Settings whose limits are within reach of a history of a few dozen events."""
    return Settings(
        max_jobs=draw(st.sampled_from([1, 2, 0, 3])),
        reserve_margin_blocks=draw(st.integers(0, 4)),
        reserve_max_blocks=draw(st.integers(0, 8)),
        low_available_tokens_threshold=draw(st.sampled_from([0, 64, 160, 4096])),
        short_decode_token_threshold=draw(st.sampled_from([0, 2, 32, 128, 200])),
        ewma_alpha=draw(st.sampled_from([0.1, 0.5, 1.0])),
        look_ahead=draw(st.booleans()),
    )


@st.composite
def engines(draw: st.DrawFn) -> FakeEngine:
    """Engines with a pool of a few blocks."""
    return FakeEngine(
        usable_blocks=draw(st.integers(1, 60)),
        block_size=BLOCK_SIZE,
        step_tokens=draw(st.sampled_from([16, 48, 8192])),
        lookahead_tokens=draw(st.sampled_from([0, 0, 3])),
        max_running=draw(st.sampled_from([256, 256, 3])),
        padding_tokens=draw(st.sampled_from([0, 0, 2])),
    )


@st.composite
def requests(draw: st.DrawFn, request_id: str) -> FakeRequest:
    """A request whose prompt takes up to six blocks, tagged with a job or naming it otherwise."""
    job = draw(job_names)
    named = draw(st.booleans())
    max_tokens = draw(st.integers(1, 400))
    return FakeRequest(
        request_id=request_id if named else f"{request_id}#job_name[{job}]#",
        num_prompt_tokens=draw(st.integers(1, 6 * BLOCK_SIZE)),
        max_tokens=max_tokens,
        priority=draw(st.integers(-1, 1)),
        sampling_params=FakeSamplingParams(
            min_tokens=draw(st.integers(0, min(4, max_tokens))),
            extra_args={"job_name": job} if named else None,
        ),
    )


@st.composite
def engine_limits(draw: st.DrawFn) -> EngineLimits:
    """Limits that bind: a pool of a few blocks, a few requests at once, prefills in many chunks."""
    max_model_len = 256
    chunked = draw(st.booleans())
    # Without chunked prefill a step must hold the longest prompt.
    step_tokens = [8, 24, 64, 512] if chunked else [max_model_len, 2 * max_model_len]
    return EngineLimits(
        num_blocks=1 + draw(st.integers(1, 32)),
        block_size=draw(st.sampled_from([4, 16])),
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.sampled_from(step_tokens)),
        max_model_len=max_model_len,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        enable_chunked_prefill=chunked,
    )


@st.composite
def batches(draw: st.DrawFn, *, all_fit: bool = False) -> Batch:
    """Batches of up to ten requests; with ``all_fit`` the whole pool can hold each one to its end."""
    limits = draw(engine_limits())
    events: list[Event] = []
    for number in range(draw(st.integers(1, 10))):
        request = draw(submissions(number))
        blocks = blocks_for(request.prompt_tokens + request.output_tokens, limits.block_size)
        if all_fit and blocks > limits.usable_blocks:
            prompt, output = (limits.usable_blocks * limits.block_size) - 1, 1
            request = Submit(request.request_id, prompt, output, output, request.priority)
        events.append(request)
        if draw(st.booleans()):
            events.append(Steps(draw(st.integers(1, 12))))
        if draw(st.sampled_from([False, False, False, True])):
            names = [event.request_id for event in events if isinstance(event, Submit)]
            events.append(Abort(draw(st.sampled_from(names))))
    return Batch(limits, tuple(events))


@st.composite
def submissions(draw: st.DrawFn, number: int) -> Submit:
    """The arrival of a request of some job; names sort in the order of arrival."""
    decode_tokens = draw(st.integers(1, 60))
    return Submit(
        request_id=f"{number:03}#job_name[{draw(job_names)}]#",
        prompt_tokens=draw(st.integers(1, 96)),
        decode_tokens=decode_tokens,
        max_tokens=draw(st.sampled_from([decode_tokens, 100, 5])),
        priority=draw(st.integers(-1, 1)),
    )


@st.composite
def workloads(draw: st.DrawFn, max_model_len: int = 512, max_requests: int = 40) -> Workload:
    """Batches for a model of that length; the output lengths of a job resemble each other."""
    typical = {job: draw(st.integers(1, max_model_len // 2)) for job in draw(st.sets(job_names, min_size=1))}
    members: list[WorkloadRequest] = []
    for _ in range(draw(st.integers(0, max_requests))):
        job = draw(st.sampled_from(sorted(typical)))
        output_tokens = min(max_model_len - 1, max(1, typical[job] + draw(st.integers(-4, 4))))
        prompt_tokens = draw(st.integers(1, max_model_len - output_tokens))
        members.append(WorkloadRequest(job, prompt_tokens, output_tokens))
    return Workload(max_model_len, tuple(members))


_which = st.integers(0, 9)
_events = st.one_of(
    st.builds(events.Arrive, job_names, st.integers(1, 6 * BLOCK_SIZE)),
    st.builds(events.Admit),
    st.builds(events.Finish, _which, st.integers(0, 300)),
    st.builds(events.Preempt, _which),
    st.builds(events.Abort, _which),
    st.builds(events.Withhold, st.integers(0, 24)),
)


def histories(max_size: int = 50) -> st.SearchStrategy[list[events.Event]]:
    """Sequences of events to :func:`batchjob_testkit.events.play` on a queue."""
    return st.lists(_events, max_size=max_size)

"""Hypothesis strategies for jobs, requests, settings and pools. Small values, so that limits are met."""

from __future__ import annotations

from hypothesis import strategies as st

from batchjob_spec.queue import Settings
from batchjob_testkit.fakes import FakeEngine, FakeRequest, FakeSamplingParams

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

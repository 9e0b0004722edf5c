"""Rules V1 to V5 in production against the specification's."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

import batchjob_spec.reservation as spec
from batchjob_scheduler.config import BatchJobConfig
from batchjob_scheduler.reservation import LOOK_AHEAD_TOKENS, PredictedPeak, next_step_blocks
from batchjob_scheduler.running import Running
from batchjob_testkit.fakes import FakeRequest

ALL = 10**9
"""More than any request needs."""


def some_end(request):
    return 2 * request.num_tokens


@dataclass
class Engine:
    block_size: int
    step_tokens: int
    lookahead_tokens: int
    usable_blocks: int = 1000
    free: int = 0
    runs: list[FakeRequest] = field(default_factory=list)

    def free_blocks(self):
        return self.free

    def running(self):
        return self.runs


engines = st.builds(Engine, st.integers(1, 128), st.integers(1, 600), st.integers(0, 9))


@st.composite
def running_requests(draw):
    request = FakeRequest("r", draw(st.integers(1, 900)), 4096)
    request.num_output_tokens = draw(st.integers(0, 200))
    request.num_output_placeholders = draw(st.integers(0, 2))
    known = request.num_tokens + request.num_output_placeholders
    request.num_computed_tokens = draw(st.integers(0, known))
    return request


def known_tokens(request):
    return request.num_tokens + request.num_output_placeholders


def expected_blocks(request, engine):
    return spec.next_step_blocks(
        request.num_computed_tokens,
        known_tokens(request),
        engine.step_tokens,
        engine.lookahead_tokens,
        engine.block_size,
    )


@given(running_requests(), engines)
def test_v1_both_count_the_same_blocks(request, engine):
    mine = next_step_blocks(known_tokens(request), request.num_computed_tokens, engine)
    assert mine == expected_blocks(request, engine)


@given(
    st.lists(running_requests(), max_size=8),
    engines,
    st.integers(0, 40),
    st.integers(0, 12),
    st.integers(0, 12),
)
def test_v2_v3_both_leave_the_same_budget(running, engine, free, margin, limit):
    engine.free, engine.runs = free, running
    config = BatchJobConfig(reserve_margin_blocks=margin, reserve_max_blocks=limit)
    reserve = spec.reserve_blocks(sum(expected_blocks(request, engine) for request in running), margin, limit)
    budget = spec.budget_tokens(free, reserve, engine.block_size)
    both = look_at(engine, config)
    assert both.budget_blocks() * engine.block_size == budget


members = st.tuples(st.integers(0, 500), st.integers(1, 50))


@given(st.lists(members, max_size=10), members)
def test_v5_both_predict_the_same_peak(running, candidate):
    peak = PredictedPeak()
    for held, remaining in running:
        peak.add([held], [remaining])
    held, remaining = candidate
    assert held + peak.beside(remaining) == spec.predicted_peak_tokens(running, candidate)


def expected_attainable(engine):
    held = sum(
        spec.blocks_for(
            min(known_tokens(request), request.num_computed_tokens + engine.step_tokens), engine.block_size
        )
        for request in engine.runs
    )
    return spec.attainable_tokens(engine.free, held, engine.block_size)


@given(
    st.lists(running_requests(), max_size=8),
    engines,
    st.integers(0, 900),
    st.integers(1, 300),
    st.integers(1, LOOK_AHEAD_TOKENS),
)
def test_v5_both_find_room_for_the_same_requests(running, engine, free, need, remaining):
    engine.free, engine.runs = free, running
    size = engine.block_size
    held = spec.blocks_for(need, size) * size
    members = [
        (
            spec.blocks_for(known_tokens(request), size) * size,
            spec.within_look_ahead(some_end(request) - known_tokens(request)),
        )
        for request in running
    ]
    fits = spec.predicted_peak_tokens(members, (held, remaining)) <= expected_attainable(engine)
    for enough in (need, ALL):
        assert (need <= look_at(engine).room_tokens(remaining, enough)) is fits


@given(st.lists(running_requests(), max_size=8), engines, st.integers(0, 40))
def test_v5_both_find_the_same_tokens_attainable(running, engine, free):
    engine.free, engine.runs = free, running
    assert look_at(engine).attainable_tokens() == expected_attainable(engine)


@given(st.lists(running_requests(), min_size=1, max_size=8), engines, st.integers(0, 8))
def test_what_is_looked_at_once_a_step_is_what_a_look_at_everything_finds(running, engine, started_before):
    """Requests start one after the other within a step, and at its end all have computed."""
    engine.free, engine.runs = 40, running[:started_before]
    within = Running(engine, BatchJobConfig(), end_of=some_end)
    within.begin_step()
    within.look()
    for request in running[started_before:]:
        engine.runs = [*engine.runs, request]
        within.look()
        assert_alike(within, engine)
    within.end_step()
    for request in running:
        request.num_output_tokens += 7
    within.look()
    assert_alike(within, engine)


@given(st.lists(running_requests(), min_size=2, max_size=8), engines)
def test_what_no_longer_runs_is_not_counted(running, engine):
    engine.free, engine.runs = 40, running
    within = Running(engine, BatchJobConfig(), end_of=some_end)
    within.begin_step()
    within.look()
    engine.runs = running[:-1]
    within.look()
    assert_alike(within, engine)


def look_at(engine, config=None):
    running = Running(engine, config or BatchJobConfig(), end_of=some_end)
    running.look()
    return running


def assert_alike(within, engine):
    anew = look_at(engine)
    assert within.budget_blocks() == anew.budget_blocks()
    assert within.held_blocks == anew.held_blocks
    for remaining in (1, 30, 256):
        assert within.room_tokens(remaining, ALL) == anew.room_tokens(remaining, ALL)


@given(st.lists(members, max_size=8), members)
def test_v5_the_peak_is_what_a_step_by_step_decode_holds_at_most(running, candidate):
    """An independent source: let all decode a token a step, and see what they hold together."""
    everyone, most = [*running, candidate], 0
    for step in range(1, candidate[1] + 1):
        present = [held for held, remaining in everyone if remaining >= step]
        most = max(most, sum(present) + step * len(present))
    assert spec.predicted_peak_tokens(running, candidate) == most

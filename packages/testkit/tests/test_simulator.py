"""The simulator: small runs computed by hand, the bound, and what a run refuses to let pass."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from batchjob_testkit import strategies
from batchjob_testkit.engines import EngineLimits, NoProgressError, Outcome
from batchjob_testkit.fakes import FCFSQueue
from batchjob_testkit.simulator.bound import lower_bound_seconds, work
from batchjob_testkit.simulator.fake_backend import FakeBackend
from batchjob_testkit.simulator.mixes import MIXES
from batchjob_testkit.simulator.profiles import PROFILES, TIMINGS, DeviceProfile
from batchjob_testkit.simulator.scenario import (
    Scenario,
    lengths_told,
    longest_job_first,
    longest_request_urgent,
)
from batchjob_testkit.simulator.simulation import simulate
from batchjob_testkit.workloads import Workload, WorkloadRequest

TOY = DeviceProfile(
    name="toy",
    overhead_seconds=1,
    seconds_per_token=0.5,
    weight_seconds=4,
    seconds_per_context_token=0.25,
    num_blocks=100,
)


def scenario(*requests, max_model_len=512, arrivals_per_second=None, prefix=False, **limits):
    return Scenario(
        name="small",
        workload=Workload(max_model_len, requests),
        limits=EngineLimits(max_model_len=max_model_len, **limits),
        arrivals_per_second=arrivals_per_second,
        enable_prefix_caching=prefix,
    )


def request(prompt, output, job="news", **fields):
    return WorkloadRequest(job, prompt, output, **fields)


# --- a run by hand ----------------------------------------------------------------------------------


def test_a_request_alone_takes_its_steps():
    """10 tokens of prompt and 3 of output: 10, 1 and 1 tokens over contexts of 10, 11 and 12."""
    results = simulate(FakeBackend(), scenario(request(10, 3)), TOY)
    serial, overlap = results["serial"], results["overlap"]
    assert serial.makespan_seconds == (1 + 5 + 2.5) + (1 + 4 + 2.75) + (1 + 4 + 3)
    assert overlap.makespan_seconds == (1 + 6.5) + (1 + 6.75) + (1 + 7)
    for result in results.values():
        assert (result.steps, result.scheduled_tokens, result.output_tokens) == (3, 12, 3)
        assert result.tokens_per_step == 4
        assert (result.preemptions, result.recomputed_tokens) == (0, 0)
        assert result.job_finish_seconds == {"news": result.makespan_seconds}
        assert result.kv_use == pytest.approx(1 / 1000)


def test_a_preempted_request_computes_its_tokens_again():
    """Two of 16 + 20 tokens on 4 blocks of 16: when both need a third block, the second must go.

    It has then computed its 16 tokens of prompt and 16 more, all of which it computes a second time.
    """
    batch = scenario(request(16, 20), request(16, 20), num_blocks=5)
    result = simulate(FakeBackend(), batch, TOY)["serial"]
    assert (result.preemptions, result.recomputed_tokens) == (1, 32)
    assert result.scheduled_tokens == 2 * (16 + 19) + 32


def test_the_tail_begins_when_95_percent_are_done():
    """Of 21 requests 20 end at once, and one needs two steps more: contexts of 2 and 3 tokens."""
    batch = scenario(*[request(1, 1)] * 20, request(1, 3, job="long"), max_num_seqs=32)
    result = simulate(FakeBackend(), batch, TOY)["serial"]
    assert result.tail_seconds == (1 + 4 + 0.5) + (1 + 4 + 0.75)
    assert result.job_finish_seconds["long"] - result.job_finish_seconds["news"] == result.tail_seconds


def test_requests_trickle_in():
    """One each 100 seconds, so each is alone, and time passes while nothing is there."""
    batch = scenario(request(10, 1), request(10, 1), arrivals_per_second=0.01)
    result = simulate(FakeBackend(), batch, TOY)["serial"]
    assert result.makespan_seconds == 100 + (1 + 5 + 2.5)
    assert result.bound_seconds == result.makespan_seconds
    # While the first is computed for 8.5 seconds, all others arrive; together they take one step.
    batch = scenario(*[request(10, 1)] * 5, arrivals_per_second=1)
    result = simulate(FakeBackend(), batch, TOY)["serial"]
    assert result.makespan_seconds == 8.5 + (1 + 0.5 * 40 + 0.25 * 40)


def test_the_moments_of_a_run_say_what_was_running():
    batch = scenario(request(16, 1), request(16, 2, job="chat"), num_blocks=5)
    result = simulate(FakeBackend(), batch, TOY, keep_moments=True)["serial"]
    assert [(moment.kv_use, dict(moment.running)) for moment in result.moments] == [
        (0.5, {"news": 1, "chat": 1}),
        (0.5, {"chat": 1}),
    ]
    assert result.moments[-1].seconds == result.makespan_seconds


# --- the bound ----------------------------------------------------------------------------------------


def test_the_bound_of_small_batches_by_hand():
    # 3 steps of at least 1 + 4 seconds, 12 tokens, and contexts of 10, 11 and 12.
    alone = work(scenario(request(10, 3)))
    assert (alone.steps["longest request"], alone.tokens, alone.context_tokens) == (3, 12, 33)
    assert alone.seconds(TOY, "serial") == 3 * 1 + 3 * 4 + 33 / 4
    assert alone.seconds(TOY, "overlap") == 3 * 1 + 3 * 4 + 33 / 4
    # A prompt of 25 takes 3 steps of 10 tokens before the second token of output is computed.
    assert work(scenario(request(25, 3), max_num_batched_tokens=10)).steps["longest request"] == 5
    # Nine outputs on two slots, one token a step.
    slots = scenario(*[request(5, 3)] * 3, max_num_seqs=2)
    assert work(slots).steps["slots"] == 5
    # 16 + 3 tokens hold 1 block for one step and 2 for three: 7 of each, on 3 blocks.
    area = scenario(*[request(16, 4)] * 3, num_blocks=4)
    assert work(area).steps["KV cache"] == 7
    # 3 * (16 + 3) tokens, 8 a step.
    budget = scenario(*[request(16, 4)] * 3, max_num_batched_tokens=8)
    assert work(budget).steps["token budget"] == 8


def test_a_shared_prefix_is_computed_once_and_held_once():
    """Two prompts of 40 with 35 in common: 2 blocks of 16 are shared."""
    batch = scenario(*[request(40, 2, prefix_tokens=35)] * 2, prefix=True)
    assert work(batch).tokens == 32 + 2 * (40 - 32 + 1)
    assert work(batch).context_tokens == 2 * (40 + 41)
    assert work(scenario(*batch.requests)).tokens == 2 * 41


def block_steps_counted(requests, size):
    return sum(-(-(r.prompt_tokens + step) // size) for r in requests for step in range(r.output_tokens))


@given(strategies.workloads(max_model_len=64, max_requests=8))
def test_the_area_of_the_bound_is_that_counted_step_by_step(workload):
    batch = scenario(*workload.requests, max_model_len=64, num_blocks=1 + 4 + 1)
    assert work(batch).steps["KV cache"] == -(-block_steps_counted(workload.requests, 16) // 5)


@given(
    strategies.workloads(max_model_len=96, max_requests=12),
    st.integers(6, 30),
    st.integers(1, 8),
    st.sampled_from([4, 32, 512]),
    st.sampled_from([None, 0.05, 1.0]),
    st.booleans(),
)
@hypothesis_settings(max_examples=60)
def test_no_run_is_below_the_bound(workload, blocks, slots, budget, arrivals, priority):
    if not workload.requests:
        return
    batch = scenario(
        *workload.requests,
        max_model_len=96,
        num_blocks=blocks + 1,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        arrivals_per_second=arrivals,
        policy="priority" if priority else "fcfs",
    )
    batch = longest_request_urgent(batch) if priority else batch
    for profile, timing in product((TOY, PROFILES["h100"]), TIMINGS):
        result = simulate(FakeBackend(), batch, profile, timings=[timing])[timing]
        assert result.makespan_seconds >= result.bound_seconds * (1 - 1e-9)


@given(
    st.sampled_from(TIMINGS),
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=6),
)
def test_no_division_of_work_into_steps_takes_less(timing, steps):
    tokens, contexts = (sum(values) for values in zip(*steps, strict=True))
    together = sum(TOY.step_seconds(timing, *step) for step in steps)
    assert TOY.seconds(timing, len(steps), tokens, contexts) <= together + 1e-9


# --- the order of the input ---------------------------------------------------------------------------


def test_input_sorted_by_job_means_keeps_the_order_within_a_job():
    batch = scenario(request(1, 9, "b"), request(1, 10, "a"), request(2, 12, "b"))
    assert longest_job_first(batch).requests == (batch.requests[0], batch.requests[2], batch.requests[1])


def test_true_lengths_as_priorities_run_the_longest_first():
    batch = scenario(request(1, 2, "short"), request(1, 9, "long"), policy="priority", max_num_seqs=1)
    finish = simulate(FakeBackend(), longest_request_urgent(batch), TOY)["serial"].job_finish_seconds
    assert finish["long"] < finish["short"]


def test_told_lengths_are_caps_and_jobs_of_almost_equal_requests():
    batch = scenario(request(1, 100, "a"), request(1, 105, "b"), request(1, 150, "b"))
    told = lengths_told(batch).requests
    assert [told_request.max_tokens for told_request in told] == [100, 105, 150]
    assert told[0].job == told[1].job != told[2].job
    shared = scenario(request(9, 100, "a", prefix_tokens=5), prefix=True)
    assert lengths_told(shared).requests[0].job == "a"


# --- what is refused ----------------------------------------------------------------------------------


def test_a_scenario_that_its_engine_cannot_serve_is_refused():
    with pytest.raises(ValueError, match="request 1 of job 'news': stores 65 tokens, allowed: up to the 64"):
        scenario(request(16, 49), request(16, 50), num_blocks=5)
    with pytest.raises(ValueError, match=r"max_model_len of the workload is 64, allowed: .* 128"):
        Scenario(name="x", workload=Workload(64, ()), limits=EngineLimits(max_model_len=128))
    with pytest.raises(ValueError, match="arrivals_per_second is 0, allowed: above 0"):
        scenario(request(1, 1), arrivals_per_second=0)
    with pytest.raises(ValueError, match="enable_prefix_caching is True, allowed: False on the fake engine"):
        FakeBackend()(scenario(request(1, 1), prefix=True))


class StuckQueue(FCFSQueue):
    """Offers nothing once the first request has come."""

    def __bool__(self):
        return False


def test_a_run_without_progress_ends_with_the_state():
    with pytest.raises(NoProgressError) as error:
        simulate(FakeBackend(StuckQueue), scenario(request(10, 3)), TOY)
    assert "small: 0 of 1 requests are answered after 0 steps, 21 idle ones since" in str(error.value)
    assert "waiting ['#job_name[news]#0 (10 tokens)']" in str(error.value)


class Tampered:
    """An engine whose answers are changed by ``tamper``."""

    def __init__(self, tamper):
        self.tamper = tamper

    def __call__(self, batch):
        engine = FakeBackend()(batch)
        step = engine.step

        def tampered_step():
            scheduled = step()
            self.tamper(engine.answers)
            return scheduled

        engine.step = tampered_step
        return engine


def twice(answers):
    if len(answers) == 2:
        answers[1] = answers[0]


def one_token_less(answers):
    if len(answers) == 2:
        name, outcome = answers[1]
        answers[1] = (name, replace(outcome, tokens=outcome.tokens[:1]))


def another_reason(answers):
    if len(answers) == 2:
        answers[1] = (answers[1][0], Outcome(answers[1][1].tokens, "abort", None))


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (twice, "each request is answered once"),
        (one_token_less, r"is answered \(101,\), not \(101, 1\)"),
        (another_reason, "ends by abort, not stop"),
    ],
)
def test_a_wrong_answer_ends_the_run(tamper, message):
    batch = scenario(request(10, 1), request(10, 2))
    simulate(Tampered(len), batch, TOY)
    with pytest.raises(AssertionError, match=message):
        simulate(Tampered(tamper), batch, TOY)


def test_a_block_that_is_still_held_ends_the_run():
    def leak(batch):
        engine = FakeBackend()(batch)
        engine._core.engine.withhold(1)
        return engine

    with pytest.raises(AssertionError, match="999 of 1000 blocks are free"):
        simulate(leak, scenario(request(10, 3)), TOY)


# --- the mixes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXES)
def test_a_mix_is_as_long_as_asked_and_the_same_for_a_seed(name):
    mixes = [
        MIXES[name].scenario(name, PROFILES["h100"], requests=50, seed=seed).requests for seed in (1, 1, 2)
    ]
    assert [len(requests) for requests in mixes] == [50, 50, 50]
    assert mixes[0] == mixes[1] != mixes[2]


def test_the_starved_mix_has_a_quarter_of_the_cache():
    full, starved = (
        MIXES[name].scenario(name, PROFILES["h100"], requests=4, seed=0)
        for name in ("four-jobs", "four-jobs-starved")
    )
    assert starved.limits.usable_blocks == full.limits.usable_blocks // 4
    assert starved.requests == full.requests


def test_arrivals_are_even():
    batch = scenario(*[request(1, 1)] * 4, arrivals_per_second=50)
    assert [batch.arrival_seconds(number) for number in range(4)] == pytest.approx([0, 0.02, 0.04, 0.06])
    assert lower_bound_seconds(batch, PROFILES["h100"], "serial") > 0.06

"""The production classes inside vLLM's own scheduler and KV cache manager, on CPU.

The engine's own ledger is read (its block pool, its running list, the outputs that it emits), never
the queue's counters.
"""

from __future__ import annotations

import json

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from batchjob_scheduler.config import ConfigError
from batchjob_scheduler.scheduler import BatchJobAwareAsyncScheduler, BatchJobAwareScheduler
from batchjob_testkit.vllm_scheduler import EngineOptions, VirtualEngine

pytestmark = pytest.mark.vllm

BLOCK = 16

# Where a preemption is wanted: the look-ahead would avoid it.
GUIDE_ONLY = {"guide_only": True}


def section(**settings):
    return {"scheduler_config": {"batch_job_sched_config": {"enabled": True, **settings}}}


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def engine(request):
    """Makes an engine under our class, synchronous and asynchronous."""

    def make(settings=None, **options):
        cls = BatchJobAwareAsyncScheduler if request.param else BatchJobAwareScheduler
        return VirtualEngine(
            cls,
            EngineOptions(
                async_scheduling=request.param, additional_config=section(**settings or {}), **options
            ),
        )

    return make


def tagged(job, number):
    return f"chatcmpl-#job_name[{job}]#{number}-5f3a"


def finish_all(engine):
    engine.run()
    engine.check_integrity()


def step_until_preemption(engine):
    while not engine.num_preemptions:
        assert engine.scheduler.has_unfinished_requests(), "nothing was preempted"
        engine.step()


def order_of_first_steps(engine):
    """The requests in the order in which they were first scheduled."""
    return list(dict.fromkeys(name for step in engine.steps for name in step))


# --- the classes are what they claim to be -----------------------------------------------------------


def test_the_classes_derive_from_vllms_own():
    assert issubclass(BatchJobAwareScheduler, Scheduler)
    assert not issubclass(BatchJobAwareScheduler, AsyncScheduler)
    assert issubclass(BatchJobAwareAsyncScheduler, AsyncScheduler)


def test_the_waiting_queue_is_ours_and_a_request_queue(engine):
    queue = engine().scheduler.waiting
    assert type(queue).__module__ == "batchjob_scheduler.queue"
    assert isinstance(queue, RequestQueue)


# --- whole batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("chunked_prefill", [False, True])
@pytest.mark.parametrize("usable_blocks", [24, 40, 2000])
def test_every_request_is_answered_in_full_and_no_block_leaks(
    engine, prefix_caching, chunked_prefill, usable_blocks
):
    e = engine(
        num_blocks=usable_blocks + 1,
        enable_prefix_caching=prefix_caching,
        enable_chunked_prefill=chunked_prefill,
        max_num_batched_tokens=8192 if not chunked_prefill else 64,
    )
    template = list(range(2 * BLOCK))
    lengths = {}
    for number in range(60):
        name = tagged(f"job{number % 3}", number)
        lengths[name] = 1 + number * 37 % 150
        e.submit(name, template + [500 + number] * (1 + number * 7 % 100), lengths[name])
    finish_all(e)
    assert {name: len(outcome.tokens) for name, outcome in e.outcomes.items()} == lengths
    assert {outcome.finish_reason for outcome in e.outcomes.values()} == {"stop"}


@pytest.mark.parametrize("order", ["lpt", "blend"])
@pytest.mark.parametrize("num_blocks", [60, 600], ids=["starved", "ample"])
def test_a_shaped_step_computes_every_decode_and_never_more_than_the_engines_budget(
    engine, order, num_blocks
):
    e = engine({"order": order}, num_blocks=num_blocks, max_num_seqs=24, max_num_batched_tokens=256)
    lengths = {}
    for number in range(150):
        name = tagged(f"job{number % 4}", number)
        lengths[name] = [3, 30, 90, 8][number % 4] + number % 7
        e.submit(name, [20, 40, 20, 200][number % 4], lengths[name])
    tokens_per_step = []
    while e.scheduler.has_unfinished_requests():
        decoding = {r.request_id for r in e.scheduler.running if is_decoding(r)}
        scheduled = e.step()
        kept = decoding & {*e.running_ids, *e.outcomes}
        assert kept <= scheduled.keys(), "a decode was left out"
        tokens_per_step.append(sum(scheduled.values()))
        assert len(tokens_per_step) < 20_000
    finish_all(e)
    assert max(tokens_per_step) <= 256
    assert {name: len(outcome.tokens) for name, outcome in e.outcomes.items()} == lengths


def is_decoding(request):
    in_flight = request.num_output_placeholders
    return request.num_output_tokens and request.num_output_tokens + in_flight < request.max_tokens


def test_without_chunked_prefill_steps_are_not_shaped(engine):
    budgets = {}
    for chunked in (True, False):
        e = engine(enable_chunked_prefill=chunked, max_num_batched_tokens=256, max_model_len=256)
        for number in range(20):
            e.submit(tagged("long", number), 200, 30)
        budgets[chunked] = set()
        while e.scheduler.has_unfinished_requests():
            e.step()
            budgets[chunked].add(e.scheduler.max_num_scheduled_tokens)
        finish_all(e)
    assert min(budgets[True]) < 256
    assert budgets[False] == {256}


def test_on_a_cpu_steps_are_not_shaped_once_a_request_has_a_seed(engine):
    """vLLM's runner dies there when it computes a part of a prompt whose request has a generator."""
    e = engine(max_num_batched_tokens=256, max_model_len=256)
    for number in range(20):
        e.submit(tagged("long", number), 200, 30)
    while e.scheduler.max_num_scheduled_tokens == 256:
        e.step()
        assert e.scheduler.has_unfinished_requests(), "no step was shaped"
    e.submit("seeded", 20, 30, seed=0)
    budgets = set()
    while e.scheduler.has_unfinished_requests():
        e.step()
        budgets.add(e.scheduler.max_num_scheduled_tokens)
    finish_all(e)
    assert budgets == {256}


def test_preempted_requests_resume_and_lose_no_token(engine):
    e = engine(GUIDE_ONLY, num_blocks=25)
    for number in range(12):
        e.submit(tagged("long", number), 2 * BLOCK, 100)
    finish_all(e)
    assert e.num_preemptions > 0
    for outcome in e.outcomes.values():
        # Token k of the oracle is 100 + k, so a lost or doubled one is seen.
        assert outcome.tokens[:-1] == tuple(range(101, 200))


def test_the_children_of_one_request_belong_to_its_job(engine):
    e = engine()
    e.submit("0_" + tagged("pair", 1), BLOCK, 10)
    e.submit("1_" + tagged("pair", 1), BLOCK, 20)
    finish_all(e)
    (job,) = e.scheduler.waiting.jobs
    assert (job.name, job.arrived, job.finished) == ("pair", 2, 2)


def test_the_look_ahead_lets_less_be_preempted(engine):
    preemptions = []
    for settings in (GUIDE_ONLY, {}):
        e = engine(settings, num_blocks=101)
        for number in range(40):
            e.submit(tagged("long", number), 2 * BLOCK, 200 + 5 * number)
        finish_all(e)
        preemptions.append(e.num_preemptions)
    without, with_look_ahead = preemptions
    assert with_look_ahead < without / 2


# --- aborts ------------------------------------------------------------------------------------------


def test_abort_while_waiting(engine):
    e = engine(max_num_seqs=1)
    e.submit(tagged("a", 0), BLOCK, 30)
    e.submit(tagged("a", 1), BLOCK, 30)
    e.step()
    (waiting,) = e.scheduler.waiting
    e.abort(waiting.request_id)
    finish_all(e)
    assert waiting.request_id not in order_of_first_steps(e)


def test_abort_of_the_request_that_was_just_peeked(engine):
    """Without chunked prefill a peeked request can find no room in the step, and stay."""
    e = engine(enable_chunked_prefill=False, max_num_batched_tokens=256, max_model_len=256)
    e.submit(tagged("a", 0), 200, 5)
    e.submit(tagged("a", 1), 201, 5)
    e.submit(tagged("a", 2), 202, 5)
    e.step()
    peeked = e.scheduler.waiting.peek_request().request_id
    e.abort(peeked)
    finish_all(e)
    assert peeked not in order_of_first_steps(e)
    assert sorted(o.finish_reason for o in e.outcomes.values()) == ["abort", "stop", "stop"]


def test_abort_while_running(engine):
    e = engine()
    for number in range(3):
        e.submit(tagged("a", number), BLOCK, 30)
    e.step()
    e.step()
    e.abort(tagged("a", 1))
    finish_all(e)


def test_abort_while_preempted(engine):
    e = engine(GUIDE_ONLY, num_blocks=17)
    for number in range(8):
        e.submit(tagged("a", number), 2 * BLOCK, 100)
    step_until_preemption(e)
    preempted = next(r for r in e.requests.values() if r.status == RequestStatus.PREEMPTED)
    e.abort(preempted.request_id)
    finish_all(e)


# --- priority ----------------------------------------------------------------------------------------


def test_priority_is_the_outermost_key_of_the_order(engine):
    e = engine(policy="priority", max_num_seqs=1)
    for number, priority in enumerate([3, 1, 2, 0]):
        e.submit(tagged(f"job{number}", number), BLOCK * (1 + priority), 2, priority=priority)
    finish_all(e)
    assert [e.requests[name].priority for name in order_of_first_steps(e)] == [0, 1, 2, 3]


def test_the_victim_is_the_one_that_vllm_would_choose(engine):
    e = engine(GUIDE_ONLY, policy="priority", num_blocks=12)
    for number, priority in enumerate([0, 5, 1]):
        e.submit(tagged("a", number), 2 * BLOCK, 100, priority=priority)
    step_until_preemption(e)
    victims = [r.priority for r in e.requests.values() if r.num_preemptions]
    assert victims == [5]
    finish_all(e)


def test_without_the_policy_priorities_are_ignored(engine):
    e = engine(max_num_seqs=1)
    e.submit(tagged("a", 0), BLOCK, 2, priority=9)
    e.submit(tagged("a", 1), BLOCK, 2, priority=0)
    finish_all(e)
    assert order_of_first_steps(e) == [tagged("a", 0), tagged("a", 1)]


# --- faults that a scheduler of this kind is known for ---------------------------------------------------


@pytest.mark.parametrize("max_jobs", [0, 1, 20])
def test_more_jobs_than_places_end_nothing(engine, max_jobs):
    e = engine({"max_jobs": max_jobs})
    for number in range(50):
        e.submit(tagged(f"job {number}", number), BLOCK, 5)
    finish_all(e)
    for number in range(50, 100):  # and one after the other
        e.submit(tagged(f"job {number}", number), BLOCK, 5)
        e.run()
    e.check_integrity()


def test_a_pool_smaller_than_the_margins_still_admits(engine):
    e = engine({"reserve_margin_blocks": 64, "reserve_max_blocks": 64}, num_blocks=9)
    for number in range(5):
        e.submit(tagged("a", number), 2 * BLOCK, 20)
    finish_all(e)


def test_a_pool_of_three_blocks_serves_with_the_default_settings(engine):
    e = engine(num_blocks=4)
    e.submit(tagged("a", 0), BLOCK, 3)
    finish_all(e)
    assert len(e.steps) < 10


def test_an_estimate_goes_on_learning_after_many_observations(engine):
    e = engine(max_num_seqs=1)
    for number in range(30):
        e.submit(tagged("a", number), BLOCK, 10 if number < 15 else 2000)
    finish_all(e)
    (job,) = e.scheduler.waiting.jobs
    # Fifteen observations of 2000 after 10: 10 + (2000 - 10) * (1 - 0.9**15) = 1590.
    assert job.estimator.observations == 30
    assert job.estimator.predicted_tokens == 1590


def test_requests_that_reach_their_length_cap_are_observed(engine):
    e = engine()
    for number in range(4):
        e.submit(tagged("capped", number), BLOCK, 500, max_tokens=40)
    finish_all(e)
    (job,) = e.scheduler.waiting.jobs
    assert {outcome.finish_reason for outcome in e.outcomes.values()} == {"length"}
    assert job.estimator.predicted_tokens == 40


def test_aborted_requests_are_not_observed_but_stop_strings_are(engine):
    e = engine()
    e.submit(tagged("aborted", 0), BLOCK, 50)
    e.submit(tagged("stopped", 0), BLOCK, 50, stop=["."], detokenize=True)
    for _ in range(5):
        e.step()
    # The front end finds a stop string and aborts the request in the engine.
    e.abort(tagged("aborted", 0))
    e.abort(tagged("stopped", 0))
    finish_all(e)
    observed = {job.name: job.estimator.observations for job in e.scheduler.waiting.jobs}
    assert observed == {"aborted": 0, "stopped": 1}


def test_a_long_prompt_of_an_unknown_job_holds_nobody_up(engine):
    e = engine(GUIDE_ONLY, num_blocks=41)
    e.submit(tagged("known", 0), 30 * BLOCK, 60)
    e.step()
    e.submit(tagged("unknown", 0), 35 * BLOCK, 5)
    small = [e.submit(tagged("known", number), BLOCK, 5).request_id for number in range(1, 4)]
    e.step()
    assert set(small) <= set(e.steps[-1])
    finish_all(e)


def test_a_peeked_request_does_not_hold_up_what_fits_later(engine):
    """The choice is made anew in each step, not kept from the step before."""
    e = engine(enable_chunked_prefill=False, max_num_batched_tokens=256, max_model_len=256)
    e.submit(tagged("a", 0), 100, 50)
    e.submit(tagged("b", 0), 250, 5)
    e.step()
    e.submit(tagged("a", 1), 20, 5, max_tokens=5)
    finish_all(e)


@pytest.mark.parametrize("ended_by", ["itself", "an abort"])
def test_an_id_that_is_used_again_at_once_loses_nothing(ended_by):
    e = VirtualEngine(BatchJobAwareScheduler)
    e.submit(tagged("a", 0), BLOCK, 1 if ended_by == "itself" else 9)
    e.step()
    if ended_by == "an abort":
        e.abort(tagged("a", 0))
    first = e.outcomes.pop(tagged("a", 0))
    e.submit(tagged("a", 0), BLOCK, 3)
    finish_all(e)
    assert first.finish_reason == ("stop" if ended_by == "itself" else "abort")
    assert len(e.outcomes[tagged("a", 0)].tokens) == 3


# --- what can never be served ---------------------------------------------------------------------------


def test_a_request_larger_than_the_pool_ends_with_the_numbers(engine):
    e = engine(num_blocks=11)
    e.submit(tagged("a", 0), 11 * BLOCK, 5)
    for number in range(1, 5):
        e.submit(tagged("a", number), BLOCK, 5)
    finish_all(e)
    giant = e.outcomes.pop(tagged("a", 0))
    assert giant.finish_reason == "error"
    for number in ("11 KV cache blocks", "176 tokens", "pool has 10 of 16 tokens"):
        assert number in giant.stop_reason
    assert {outcome.finish_reason for outcome in e.outcomes.values()} == {"stop"}


def test_a_request_that_outgrows_the_pool_ends_with_an_error(engine):
    e = engine(num_blocks=6)
    e.submit(tagged("a", 0), 4 * BLOCK, 100)
    e.submit(tagged("a", 1), BLOCK, 5)
    finish_all(e)
    assert e.outcomes[tagged("a", 0)].finish_reason == "error"
    assert e.outcomes[tagged("a", 1)].finish_reason == "stop"


# --- configuration and report ---------------------------------------------------------------------------


def test_settings_are_read_from_either_place():
    for additional_config in (
        section(max_jobs=3),
        {"batch_job_sched_config": {"enabled": True, "max_jobs": 3}},
    ):
        e = VirtualEngine(BatchJobAwareScheduler, EngineOptions(additional_config=additional_config))
        assert e.scheduler.waiting.jobs._max_jobs == 3


def test_a_wrong_setting_ends_the_start():
    with pytest.raises(ConfigError, match=r"max_jobs: got 'many', allowed: an integer of at least 0"):
        VirtualEngine(BatchJobAwareScheduler, EngineOptions(additional_config=section(max_jobs="many")))


@pytest.mark.parametrize(
    "request_id",
    [
        "#job_name[broken#1",
        "#job_name[a[b]c]#1",
        "#job_name[]#1",
        f"#job_name[{'long' * 5000}]#1",
        "#job_name[新闻]#1",
        "#job_name[a]##job_name[b]#1",
        "none",
        "",
    ],
)
def test_any_request_id_is_scheduled(engine, request_id):
    e = engine()
    e.submit(request_id, BLOCK, 5)
    finish_all(e)


def test_the_report_says_what_each_job_did(engine, tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    monkeypatch.setenv("BATCHJOB_REPORT", str(path))
    e = engine()
    for number in range(4):
        e.submit(tagged("a", number), BLOCK, 10)
    e.submit(tagged("b", 0), BLOCK, 30)
    finish_all(e)
    report = json.loads(path.read_text(encoding="utf-8"))
    a, b = report["jobs"]
    assert (a["job"], a["requests"], a["finished"], a["observed_tokens"]) == ("a", 4, 4, 10)
    assert (b["predicted_tokens"], b["steps"], b["preemptions"]) == (30, 30, 0)
    assert report["steps"] == sum(bool(step) for step in e.steps)


def test_each_rank_of_a_data_parallel_engine_writes_a_report_of_its_own(engine, tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    monkeypatch.setenv("BATCHJOB_REPORT", str(path))
    for rank in range(2):
        e = engine()
        monkeypatch.setattr(e.scheduler.vllm_config.parallel_config, "data_parallel_size", 2)
        monkeypatch.setattr(e.scheduler.vllm_config.parallel_config, "data_parallel_rank", rank)
        e.submit(tagged(f"of rank {rank}", 0), BLOCK, 10)
        finish_all(e)
    for rank in range(2):
        (job,) = json.loads((tmp_path / f"report.json.{rank}").read_text(encoding="utf-8"))["jobs"]
        assert job["job"] == f"of rank {rank}"
    assert not path.exists()


def test_a_report_that_cannot_be_written_ends_nothing(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHJOB_REPORT", str(tmp_path / "missing" / "report.json"))
    e = engine()
    e.submit(tagged("a", 0), BLOCK, 5)
    finish_all(e)


# --- a prefix that the requests of a job share (V4) ----------------------------------------------------

TEMPLATE = [7] * (6 * BLOCK)


def sharing(engine_factory):
    """Four requests of a job run; of 20 blocks they hold 6 together and 2 each.

    One more needs 7, of which it shares 6 with them. The first one found nothing in the cache, so four
    had to start before that is known.
    """
    engine = engine_factory(
        {"look_ahead": False, "step_shaping": False, "reserve_margin_blocks": 0},
        num_blocks=21,
        enable_prefix_caching=True,
    )
    for number in range(4):
        engine.submit(tagged("news", number), TEMPLATE + [number] * BLOCK, 30, max_tokens=60)
    for _ in range(3):
        engine.step()
    assert (len(engine.scheduler.running), engine.num_free_blocks) == (4, 6)
    return engine


def test_v4_a_shared_prefix_is_not_charged_twice(engine):
    engine = sharing(engine)
    engine.submit(tagged("news", 4), TEMPLATE + [4] * BLOCK, 5, max_tokens=60)
    engine.step()
    assert tagged("news", 4) in engine.steps[-1]
    assert engine.num_preemptions == 0
    finish_all(engine)


def test_v4_a_request_without_the_prefix_lets_others_pass_once_it_was_refused(engine):
    engine = sharing(engine)
    stranger, short = tagged("news", 4), tagged("chat", 5)
    engine.submit(stranger, [80] * (7 * BLOCK), 5, max_tokens=60)
    engine.submit(short, [90] * BLOCK, 5, max_tokens=60)
    finish_all(engine)
    first = order_of_first_steps(engine)
    assert first.index(short) < first.index(stranger)

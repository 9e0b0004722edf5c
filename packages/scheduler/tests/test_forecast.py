"""What is left of a batch, worked out by hand, and what follows for the budget of a step."""

from __future__ import annotations

import pytest

from batchjob_scheduler.blend import Turns
from batchjob_scheduler.config import BatchJobConfig
from batchjob_scheduler.forecast import FULL_STEP_TOKENS, JobWork, forecast
from batchjob_scheduler.jobs import Job
from batchjob_scheduler.pacing import MIN_PREFILL_TOKENS, step_tokens
from batchjob_scheduler.queue import BatchJobQueue
from batchjob_testkit.fakes import FakeEngine, FakeRequest


def job_work(waiting=0, prompt=100, mean=50, long=80, running=(), is_known=True):
    work = JobWork(waiting, waiting * prompt, mean, long, is_known)
    for request in running:
        work.add_running(**request)
    return work


def test_slots_that_are_short_decide_how_long_it_takes():
    # 4 requests of 50 tokens in 2 slots are 100 steps, and the last one to start may be a long one.
    left = forecast({"a": job_work(waiting=4)}, slots=2, pool_tokens=10**6)
    assert left.steps == 100 + 80
    assert left.concurrency == 2


def test_a_pool_that_is_short_decides_how_long_it_takes():
    # Each holds 100 tokens and on average half of the 50 that it decodes, for 50 steps.
    left = forecast({"a": job_work(waiting=4)}, slots=100, pool_tokens=125)
    assert left.kv_token_steps == 4 * 50 * 125
    assert left.steps == 4 * 50 + 80
    assert left.concurrency == 1
    assert left.tokens_held == 125


def test_what_runs_decodes_the_rest_of_what_its_job_usually_does():
    running = [{"known": 120, "uncomputed": 0, "output": 20, "max_tokens": 1000}]
    left = forecast({"a": job_work(running=running)}, slots=2, pool_tokens=10**6)
    assert left.decode_tokens == 30
    assert left.kv_token_steps == 30 * (120 + 15)
    assert left.steps == 80 - 20  # it may be a long one


def test_what_has_outlasted_the_longest_still_decodes_a_share_of_what_it_has():
    running = [{"known": 300, "uncomputed": 0, "output": 200, "max_tokens": 1000}]
    assert forecast({"a": job_work(running=running)}, slots=2, pool_tokens=10**6).steps == 0.3 * 200


def test_nothing_decodes_beyond_its_cap():
    running = [{"known": 110, "uncomputed": 0, "output": 10, "max_tokens": 12}]
    left = forecast({"a": job_work(running=running)}, slots=2, pool_tokens=10**6)
    assert (left.decode_tokens, left.steps) == (2, 2)


def test_what_a_request_still_decodes_is_the_mean_over_what_waits_and_what_runs():
    # Two wait for their 50 tokens, one runs and has 30 left.
    running = [{"known": 120, "uncomputed": 0, "output": 20, "max_tokens": 1000}]
    left = forecast({"a": job_work(waiting=2, running=running)}, slots=2, pool_tokens=10**6)
    assert left.mean_decode_tokens == pytest.approx(130 / 3)


def test_the_job_with_the_longest_path_is_critical():
    jobs = {"long": job_work(waiting=10, mean=100, long=300), "short": job_work(waiting=10, mean=5, long=9)}
    left = forecast(jobs, slots=10, pool_tokens=10**6)
    assert [name for name in jobs if left.is_critical(name)] == ["long"]
    assert left.critical_waiting == (10, 1000)


def test_prefill_is_what_waits_and_what_runs_and_is_not_computed():
    running = [{"known": 500, "uncomputed": 300, "output": 0, "max_tokens": 9}]
    assert forecast({"a": job_work(waiting=2, running=running)}, 2, 1000).prefill_tokens == 2 * 100 + 300


def test_a_batch_is_known_once_of_each_job_that_is_left_a_request_has_ended():
    running = [{"known": 120, "uncomputed": 0, "output": 20, "max_tokens": 1000}]
    work = {"known": job_work(waiting=1), "waits": job_work(waiting=1, is_known=False)}
    assert not forecast(work, slots=2, pool_tokens=1000).is_known
    work["waits"] = job_work(running=running, is_known=False)
    assert not forecast(work, slots=2, pool_tokens=1000).is_known
    work["waits"] = job_work(is_known=False)  # nothing is left of it
    assert forecast(work, slots=2, pool_tokens=1000).is_known


@pytest.mark.parametrize(
    ("mean", "waiting_prompt", "thin"),
    # In 600 steps: 17 tokens decoded in each, and 103 or 93 prefilled; 112.5 are three quarters of full.
    [(100, 2000, True), (100, 620, True), (100, 560, False), (100, 1, False)],
    ids=["what waits fills the steps", "most of them", "a little less", "nothing waits"],
)
def test_steps_are_thin_if_few_decode_side_by_side_and_what_waits_mostly_fills_them(
    mean, waiting_prompt, thin
):
    critical = job_work(waiting=100, mean=mean, long=mean)
    other = job_work(waiting=100, prompt=waiting_prompt, mean=1, long=1)
    left = forecast({"long": critical, "other": other}, slots=20, pool_tokens=10**6)
    assert left.concurrency == pytest.approx(20)
    assert left.is_thin is thin


# --- the budget of a step -------------------------------------------------------------------------


def busy(*, running, waiting, prompt=64, max_tokens=100, step_limit=8192, order="lpt", is_known=False):
    engine = FakeEngine(usable_blocks=10_000, step_tokens=step_limit, max_running=64)
    queue = BatchJobQueue(BatchJobConfig(look_ahead=False, order=order), engine)
    for number in range(running + waiting):
        queue.add_request(FakeRequest(f"r{number}#job_name[news]#", prompt, max_tokens))
    for _ in range(running):
        engine.start(queue.pop_request())
    if is_known:  # what was predicted before
        queue.jobs.placed("news").estimator.observe(128)
    for _ in range(8):  # after so many steps a forecast is renewed
        queue.begin_step()
        queue.end_step()
    return queue, engine


def test_an_idle_engine_and_an_empty_queue_leave_the_budget_alone():
    assert step_tokens(*busy(running=0, waiting=8)) == 8192
    assert step_tokens(*busy(running=8, waiting=0)) == 8192


@pytest.mark.parametrize("limit", [1, 40, 300, 8192])
def test_the_budget_holds_every_decode_and_never_exceeds_the_engines(limit):
    queue, engine = busy(running=60, waiting=200, step_limit=max(limit, 64))
    engine.step_tokens = limit
    budget = step_tokens(queue, engine)
    assert min(limit, max(60 + MIN_PREFILL_TOKENS, FULL_STEP_TOKENS)) <= budget <= limit


def test_draft_tokens_are_part_of_what_a_decode_needs():
    queue, engine = busy(running=60, waiting=200)
    assert step_tokens(queue, engine, tokens_per_decode=5) >= 5 * 60 + MIN_PREFILL_TOKENS


def test_prefill_is_spread_over_the_steps_that_are_left():
    # 64 run and fill all slots. 640 wait with prompts of 1024, of a job that is predicted to decode 128.
    queue, engine = busy(running=64, waiting=640, prompt=1024, max_tokens=2000)
    decode = 640 * 128 + 64 * 127
    steps = decode / 64 + 128
    even = 1.1 * (640 * 1024 + decode) / steps
    assert step_tokens(queue, engine) == int(even)


@pytest.mark.parametrize("order", ["lpt", "blend"])
def test_what_a_full_step_has_room_for_is_never_spread(order):
    # 16 decode, in as many slots, and the even share is some 30 tokens.
    queue, engine = busy(running=16, waiting=640, prompt=4, max_tokens=2000, order=order)
    engine.max_running = 16
    assert step_tokens(queue, engine) == FULL_STEP_TOKENS


@pytest.mark.parametrize("prompt", [200, 400, 1024], ids=["even is less", "about even", "even is more"])
def test_a_blended_step_computes_what_is_free_if_that_is_near_the_even_share(prompt):
    # As above; all that runs is computed.
    queue, engine = busy(
        running=64, waiting=640, prompt=prompt, max_tokens=2000, order="blend", is_known=True
    )
    context = sum(request.num_computed_tokens for request in engine.running())
    assert context == 64 * prompt
    decode = 640 * 128 + 64 * 127
    even = (640 * prompt + decode) / (decode / 64 + 128)
    free = 200 + context / 600
    places = {200: 2, 400: 1, 1024: 0}
    assert sorted([0.9 * even, free, 1.1 * even]).index(free) == places[prompt]
    assert step_tokens(queue, engine) == int(sorted([0.9 * even, free, 1.1 * even])[1])


def test_a_blended_step_of_a_full_engine_stays_near_what_is_free_while_the_even_share_is_a_guess():
    queue, engine = busy(running=64, waiting=640, prompt=1024, max_tokens=2000, order="blend")
    free = 200 + 64 * 1024 / 600
    assert step_tokens(queue, engine) == int(0.9 * 1.5 * free)


def test_the_last_of_a_blended_batch_stall_no_decodes_where_they_can_ride_along():
    # 83 tokens a step are the even share; what fits is started in about four steps.
    queue, engine = busy(running=20, waiting=44, prompt=300, max_tokens=2000, order="blend")
    free = 200 + 20 * 300 / 600
    assert step_tokens(queue, engine) == int(free + 44 * 300 / 4)


@pytest.mark.parametrize(
    ("waiting", "limit", "at_once"),
    [(44, 8192, True), (45, 8192, False), (44, 7800, False)],
    ids=["all fit", "a slot is missing", "more than twelve whole steps"],
)
def test_a_blended_batch_that_prefill_makes_long_starts_its_last_at_once(waiting, limit, at_once):
    # The even share is more than is free, and an answer has some 128 tokens: 12.8 whole steps are allowed for
    # 100,000 tokens.
    queue, engine = busy(
        running=20,
        waiting=waiting,
        prompt=100_000 // waiting,
        max_tokens=2000,
        order="blend",
        step_limit=limit,
    )
    assert (step_tokens(queue, engine) == limit) is at_once


# --- turns ----------------------------------------------------------------------------------------


def jobs_of(*names):
    return [Job(name, appeared, alpha=0.1) for appeared, name in enumerate(names)]


def engine_of(slots, *, running=1):
    """An engine where so many requests run, that has blocks for all."""
    engine = FakeEngine(usable_blocks=100_000, max_running=slots)
    for number in range(running):
        engine.start(FakeRequest(f"running {number}", 16, 16))
    return engine


def taken_in_turn(jobs, left, times):
    """How often each job is taken."""
    turns, taken = Turns(), dict.fromkeys((job.name for job in jobs), 0)
    for _ in range(times):
        first = turns.order(jobs, left, engine_of(4))[0]
        turns.take(first, left)
        taken[first.name] += 1
    return taken


def test_jobs_take_turns_in_proportion_to_what_waits_of_them():
    small, large = jobs_of("small", "large")
    small.count_waiting(10, 10 * 400)
    large.count_waiting(30, 30 * 100)
    for job in (small, large):
        job.estimator.observe(1)
    work = {"small": job_work(10, mean=1, long=1), "large": job_work(30, mean=1, long=1)}
    left = forecast({**work, "critical": job_work(1, mean=999, long=999)}, slots=4, pool_tokens=10**6)
    assert taken_in_turn([small, large], left, times=20) == {"small": 5, "large": 15}


def test_jobs_of_which_nothing_has_ended_take_turns_in_proportion_to_what_their_prompts_cost():
    # 20 of each wait; to start four of 100 tokens costs as much as one of 400, whatever is predicted.
    cheap, dear = jobs_of("cheap", "dear")
    cheap.count_waiting(20, 20 * 100)
    dear.count_waiting(20, 20 * 400)
    work = {
        "cheap": job_work(20, prompt=100, mean=1, long=1),
        "dear": job_work(20, prompt=400, mean=400, long=400),
    }
    left = forecast(work, slots=4, pool_tokens=10**6)
    assert taken_in_turn([cheap, dear], left, times=20) == {"cheap": 16, "dear": 4}


def test_what_a_job_shares_costs_nothing_to_start():
    alike, other = jobs_of("alike", "other")
    for job in (alike, other):
        job.count_waiting(20, 20 * 400)
    alike.running = 3
    for _ in range(alike.running):
        alike.find_in_cache(300)
    work = {job.name: job_work(20, prompt=400 - job.shared_tokens) for job in (alike, other)}
    left = forecast(work, slots=4, pool_tokens=10**6)
    turns = Turns()
    # 100 tokens to compute instead of 400.
    assert turns.take(alike, left) == pytest.approx(turns.take(other, left) / 4)


def test_a_job_that_joins_later_does_not_make_up_for_missed_turns():
    early, late = jobs_of("early", "late")
    early.count_waiting(10, 0)
    left = forecast({"early": job_work(10)}, slots=4, pool_tokens=10**6)
    turns = Turns()
    for _ in range(5):
        turns.order([early], left, engine_of(4))
        turns.take(early, left)
    turns.order([early], left, engine_of(4))
    turns.join(late)
    assert late.turn == early.turn


def test_jobs_known_to_be_critical_come_first_while_steps_are_full():
    other, critical = jobs_of("other", "critical")
    critical.turn = 50.0
    work = {"other": job_work(1, mean=1, long=1), "critical": job_work(1, mean=900, long=900)}
    left = forecast(work, slots=4, pool_tokens=10**6)
    assert not left.is_thin
    # What is taken for its path follows from its prompts alone, until one of its requests has ended.
    assert Turns().order([other, critical], left, engine_of(4)) == [other, critical]
    critical.estimator.observe(900)
    assert Turns().order([other, critical], left, engine_of(4)) == [critical, other]


def test_behind_critical_jobs_the_others_stay_in_turn():
    long, short, critical = jobs_of("long", "short", "critical")
    long.turn = 2.0
    decoded = {long: 9, short: 1, critical: 900}
    for job, tokens in decoded.items():
        job.estimator.observe(tokens)
    work = {job.name: job_work(1, mean=tokens, long=tokens) for job, tokens in decoded.items()}
    left = forecast(work, slots=4, pool_tokens=10**6)
    assert Turns().order([long, short, critical], left, engine_of(4)) == [critical, short, long]


def test_in_thin_steps_a_job_far_ahead_waits_unless_the_engine_is_idle():
    behind, ahead = jobs_of("behind", "ahead")
    work = {"behind": job_work(100, prompt=2000, mean=1, long=1), "ahead": job_work(100, mean=100, long=100)}
    left = forecast(work, slots=20, pool_tokens=10**6)
    assert left.is_thin
    ahead.turn = left.steps
    assert Turns().order([behind, ahead], left, engine_of(20)) == [behind]
    assert Turns().order([behind, ahead], left, engine_of(20, running=0)) == [behind, ahead]


@pytest.mark.parametrize(("free_slots", "first"), [(10, "critical"), (9, "other")])
def test_in_thin_steps_critical_work_comes_first_once_all_of_it_could_start(free_slots, first):
    other, critical = jobs_of("other", "critical")
    critical.turn = 1.0
    critical.estimator.observe(600)
    work = {"other": job_work(100, prompt=1100, mean=1, long=1), "critical": job_work(10, mean=600, long=600)}
    left = forecast(work, slots=20, pool_tokens=10**6)
    assert left.is_thin
    assert Turns().order([other, critical], left, engine_of(free_slots + 1))[0].name == first


@pytest.mark.parametrize(
    ("prompt", "steps"), [(64, 4), (1024, 64)], ids=["decoding counts", "mostly prefill"]
)
def test_free_slots_are_filled_soon_where_an_empty_one_is_lost(prompt, steps):
    # 60 of 64 slots are taken, and 640 requests of the only job, which is critical, wait.
    queue, engine = busy(running=60, waiting=640, prompt=prompt, max_tokens=2000)
    decode = 640 * 128 + 60 * 127
    even = 1.1 * (640 * prompt + decode) / (decode / 64 + 128)
    assert step_tokens(queue, engine) == int(even + 4 * prompt / steps)


@pytest.mark.parametrize(
    ("waiting", "blocks_withheld", "at_once"),
    [(44, 0, True), (45, 0, False), (44, 9_880, False)],
    ids=["all fit", "a slot is missing", "blocks are missing"],
)
def test_critical_work_that_fits_as_a_whole_starts_at_once(waiting, blocks_withheld, at_once):
    # 20 of 64 slots are taken.
    queue, engine = busy(running=20, waiting=waiting, prompt=64, max_tokens=2000)
    engine.withhold(blocks_withheld)
    assert (step_tokens(queue, engine) >= waiting * 64) is at_once

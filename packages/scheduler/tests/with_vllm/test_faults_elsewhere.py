"""What users of other schedulers reported, with the behaviour that is right.

``docs/reference/faults-elsewhere.md`` lists the reports, and where those are tested that are not here.
"""

from __future__ import annotations

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from batchjob_scheduler.scheduler import BatchJobAwareAsyncScheduler, BatchJobAwareScheduler
from batchjob_testkit.vllm_scheduler import EngineOptions, VirtualEngine

pytestmark = pytest.mark.vllm

BLOCK = 16
GUIDE_ONLY = {"batch_job_sched_config": {"guide_only": True}}


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def engine(request):
    """Makes an engine under our class, or under vLLM's own, synchronous and asynchronous."""

    def make(*, ours=True, **options):
        classes = (
            (Scheduler, AsyncScheduler) if not ours else (BatchJobAwareScheduler, BatchJobAwareAsyncScheduler)
        )
        return VirtualEngine(classes[request.param], EngineOptions(async_scheduling=request.param, **options))

    return make


def finish_all(engine):
    engine.run()
    engine.check_integrity()


def test_a_prompt_that_is_computed_in_chunks_is_admitted_only_if_all_of_it_fits(engine):
    """Else many begin, none can go on, and they throw one another out."""
    preemptions = []
    for ours in (False, True):
        e = engine(
            ours=ours,
            num_blocks=41,
            max_num_batched_tokens=20 * BLOCK,
            scheduler_config={"scheduler_reserve_full_isl": False},
        )
        for number in range(5):
            e.submit(f"#job_name[long prompts]#{number}", 30 * BLOCK, 3)
        finish_all(e)
        preemptions.append(e.num_preemptions)
    vllms_own, ours = preemptions
    assert vllms_own > 0
    assert ours == 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_what_was_preempted_goes_on_before_fresh_requests_of_its_rank(engine, policy):
    no_reserve = {"guide_only": True, "reserve_margin_blocks": 0, "reserve_max_blocks": 0}
    e = engine(policy=policy, num_blocks=17, additional_config={"batch_job_sched_config": no_reserve})
    for number in range(8):
        e.submit(f"#job_name[a]#{number}", 2 * BLOCK, 100)
    while not e.num_preemptions:
        assert e.scheduler.has_unfinished_requests(), "nothing was preempted"
        e.step()
    preempted = {r.request_id for r in e.requests.values() if r.status == RequestStatus.PREEMPTED}
    # They fit wherever the preempted do, and those of an unknown job come before those of a known one.
    fresh = {e.submit(f"#job_name[b]#{number}", 2 * BLOCK, 5).request_id for number in range(5)}
    e.abort(e.running_ids[0])  # until something has ended, what was just preempted waits
    started = []
    while not started:
        started = [name for name in e.step() if name in preempted | fresh]
        assert len(e.steps) < 1000, "neither the preempted nor the fresh requests are admitted"
    assert started[0] in preempted
    finish_all(e)


def test_a_victim_that_was_scheduled_in_the_same_step_gives_its_tokens_back(engine):
    e = engine(
        policy="priority",
        num_blocks=17,
        max_num_batched_tokens=3 * BLOCK,
        additional_config=GUIDE_ONLY,
    )
    for number in range(10):
        e.submit(f"#job_name[a]#{number}", 2 * BLOCK, 60, priority=number % 3)
    finish_all(e)
    assert e.num_preemptions > 0
    assert max(sum(step.values()) for step in e.steps) <= 3 * BLOCK


def test_children_of_one_request_with_equal_priority_and_arrival_have_an_order(engine):
    e = engine(policy="priority", max_num_seqs=2)
    for number in range(4):
        e.submit(f"{number}_chatcmpl-#job_name[n is 4]#1", BLOCK, 10).arrival_time = 1.0
    finish_all(e)
    assert {outcome.finish_reason for outcome in e.outcomes.values()} == {"stop"}


@pytest.mark.parametrize("max_jobs", [1, 2])
def test_a_request_is_preempted_though_its_job_has_lost_its_place(engine, max_jobs):
    settings = {"batch_job_sched_config": {"guide_only": True, "max_jobs": max_jobs}}
    e = engine(num_blocks=17, additional_config=settings)
    for number in range(8):
        e.submit(f"#job_name[{number}]#", 2 * BLOCK, 100)
    for number in range(8, 24):
        e.step()
        e.submit(f"#job_name[{number}]#", BLOCK, 5)
    finish_all(e)
    assert e.num_preemptions > 0
    assert {len(outcome.tokens) for outcome in e.outcomes.values()} == {100, 5}


def test_while_nothing_runs_and_something_fits_each_step_computes(engine):
    e = engine(num_blocks=9, additional_config={"batch_job_sched_config": {"reserve_margin_blocks": 50}})
    for number in range(12):
        e.submit(f"#job_name[a]#{number}", (1 + number % 6) * BLOCK, 5)
    while e.scheduler.has_unfinished_requests():
        idle = not e.running_ids
        scheduled = e.step()
        assert scheduled or not idle, f"step {len(e.steps)} computes nothing though nothing ran before it"
    finish_all(e)


def test_two_requests_under_one_external_id_are_two_requests(engine):
    """The engine adds a random suffix to an ID, so one that a user gives twice is no clash."""
    e = engine()
    e.submit("chatcmpl-#job_name[a]#1-5f3a1b2c", BLOCK, 5)
    e.submit("chatcmpl-#job_name[a]#1-99aa00ff", BLOCK, 7)
    finish_all(e)
    (job,) = e.scheduler.waiting.jobs
    assert (job.arrived, job.finished) == (2, 2)
    assert sorted(len(outcome.tokens) for outcome in e.outcomes.values()) == [5, 7]

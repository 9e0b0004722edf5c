"""What waits for something else than a place: in our queue, or with its blocks beside it, never lost.

Older versions of vLLM put all of it into a second queue and serve that first; the same holds on all.
"""

from __future__ import annotations

from itertools import chain
from random import Random

import pytest

from batchjob_scheduler.scheduler import BatchJobAwareAsyncScheduler, BatchJobAwareScheduler
from batchjob_testkit.vllm_scheduler import EngineOptions, RequestOptions, VirtualEngine

pytestmark = pytest.mark.vllm

BLOCK = 16
WAITS = RequestOptions(structured=True)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def engine(request):
    """Makes an engine under our class, synchronous and asynchronous."""

    def make(**options):
        cls = BatchJobAwareAsyncScheduler if request.param else BatchJobAwareScheduler
        section = {"batch_job_sched_config": {"enabled": True, "look_ahead": False}}
        return VirtualEngine(
            cls, EngineOptions(async_scheduling=request.param, additional_config=section, **options)
        )

    return make


def places_of(engine):
    """Who runs, who waits in our queue, and who waits beside it with its blocks."""
    scheduler = engine.scheduler
    places = (scheduler.running, scheduler.waiting, scheduler._kv_holding)
    return [[request.request_id for request in place] for place in places]


def finish_all(engine):
    engine.run()
    engine.check_integrity()


def test_what_waits_for_its_grammar_waits_in_our_queue(engine):
    e = engine()
    e.submit("waits", BLOCK, 3, options=WAITS)
    for _ in range(3):
        assert e.step() == {}
        assert places_of(e) == [[], ["waits"], []]
        assert e.scheduler.get_request_counts() == (0, 1)
    e.compile_grammar("waits")
    finish_all(e)


def test_what_waited_for_its_grammar_takes_its_place_in_the_order(engine):
    e = engine(max_num_seqs=1)
    for number in range(3):  # the first three of a job would come first anyway
        e.submit(f"first {number}", BLOCK, 1)
    while len(e.outcomes) < 3:
        e.step()
    e.submit("short", BLOCK, 3, options=WAITS)
    e.step()
    e.submit("long", 3 * BLOCK, 3)
    e.compile_grammar("short")
    finish_all(e)
    assert list(dict.fromkeys(name for step in e.steps for name in step))[3:] == ["long", "short"]


def test_what_waited_for_its_grammar_and_finds_no_room_holds_nobody_up(engine):
    e = engine(num_blocks=21)
    e.submit("runs", 10 * BLOCK, 40)
    e.submit("big", 15 * BLOCK, 3, options=WAITS)
    e.step()
    e.compile_grammar("big")
    e.step()
    e.submit("small", BLOCK, 3)
    e.step()
    assert "small" in e.steps[-1]
    finish_all(e)


def test_what_waits_for_its_grammar_and_never_fits_is_ended(engine):
    e = engine(num_blocks=11)
    e.submit("giant", 11 * BLOCK, 3, options=WAITS)
    e.submit("small", BLOCK, 3)
    finish_all(e)
    assert e.outcomes["giant"].finish_reason == "error"
    assert e.outcomes["small"].finish_reason == "stop"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_nothing_is_lost_or_doubled_between_the_queues(engine, policy):
    random = Random(5)
    e = engine(num_blocks=31, max_num_seqs=4, policy=policy)
    waiting = []
    for number in range(60):
        options = random.choice([None, WAITS])
        e.submit(str(number), random.randint(1, 5 * BLOCK), random.randint(1, 30), options=options)
        if options == WAITS:
            waiting.append(str(number))
        if waiting and random.random() < 0.4:
            e.compile_grammar(waiting.pop(random.randrange(len(waiting))))
        if random.random() < 0.1:
            e.abort(random.choice(list(e.requests)))
        e.step()
        places = places_of(e)
        assert sorted(chain(*places)) == sorted(e.scheduler.requests)
        assert e.scheduler.get_request_counts() == (len(places[0]), len(places[1]) + len(places[2]))
    for name in waiting:
        e.compile_grammar(name)
    finish_all(e)

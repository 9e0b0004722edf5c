"""What waits for something else than a place: in our queue, or with its blocks beside it, never lost.

Older versions of vLLM put all of it into a second queue and serve that first; the same holds on all.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from random import Random
from types import SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from batchjob_scheduler.scheduler import BatchJobAwareAsyncScheduler, BatchJobAwareScheduler
from batchjob_testkit.vllm_scheduler import EngineOptions, VirtualEngine

pytestmark = pytest.mark.vllm

BLOCK = 16
GRAMMAR = SimpleNamespace(accept_tokens=lambda *_: True, is_terminated=lambda: False)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def engine(request):
    """Makes an engine under our class, synchronous and asynchronous."""

    def make(**options):
        cls = BatchJobAwareAsyncScheduler if request.param else BatchJobAwareScheduler
        section = {"batch_job_sched_config": {"enabled": True, "look_ahead": False}}
        return WaitingEngine(
            cls, EngineOptions(async_scheduling=request.param, additional_config=section, **options)
        )

    return make


class WaitingEngine(VirtualEngine):
    """An engine to which requests come that wait for their grammar."""

    def submit_waiting(self, name, prompt_tokens, decode_tokens):
        add_request = self.scheduler.add_request
        self.scheduler.add_request = lambda request: add_request(wait_for_grammar(request))
        try:
            return self.submit(name, prompt_tokens, decode_tokens)
        finally:
            self.scheduler.add_request = add_request

    def ids_by_place(self):
        """Who runs, who waits in our queue, and who waits beside it with its blocks."""
        scheduler = self.scheduler
        places = (scheduler.running, scheduler.waiting, scheduler._kv_holding)
        return [[request.request_id for request in place] for place in places]


def wait_for_grammar(request):
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request.structured_output_request = SimpleNamespace(grammar=None, reasoning_ended=True)
    return request


def make_ready(request):
    """Its grammar is compiled. The schedulers under test ask no more of it than that."""
    request.structured_output_request.grammar = GRAMMAR


def finish_all(engine):
    engine.run()
    engine.check_integrity()


def test_what_waits_for_its_grammar_waits_in_our_queue(engine):
    e = engine()
    e.submit_waiting("waits", BLOCK, 3)
    for _ in range(3):
        assert e.step() == {}
        assert e.ids_by_place() == [[], ["waits"], []]
        assert e.scheduler.get_request_counts() == (0, 1)
    make_ready(e.requests["waits"])
    finish_all(e)


def test_what_waited_for_its_grammar_takes_its_place_in_the_order(engine):
    e = engine(max_num_seqs=1)
    for number in range(3):  # the first three of a job would come first anyway
        e.submit(f"first {number}", BLOCK, 1)
    while len(e.outcomes) < 3:
        e.step()
    short = e.submit_waiting("short", BLOCK, 3)
    e.step()
    e.submit("long", 3 * BLOCK, 3)
    make_ready(short)
    finish_all(e)
    assert list(dict.fromkeys(name for step in e.steps for name in step))[3:] == ["long", "short"]


def test_what_waited_for_its_grammar_and_finds_no_room_holds_nobody_up(engine):
    e = engine(num_blocks=21)
    e.submit("runs", 10 * BLOCK, 40)
    big = e.submit_waiting("big", 15 * BLOCK, 3)
    e.step()
    make_ready(big)
    e.step()
    e.submit("small", BLOCK, 3)
    e.step()
    assert "small" in e.steps[-1]
    finish_all(e)


def test_what_waits_for_its_grammar_and_never_fits_is_ended(engine):
    e = engine(num_blocks=11)
    e.submit_waiting("giant", 11 * BLOCK, 3)
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
        submit = random.choice([e.submit, e.submit_waiting])
        request = submit(str(number), random.randint(1, 5 * BLOCK), random.randint(1, 30))
        if submit == e.submit_waiting:
            waiting.append(request)
        if waiting and random.random() < 0.4:
            make_ready(waiting.pop(random.randrange(len(waiting))))
        if random.random() < 0.1:
            e.abort(random.choice(list(e.requests)))
        e.step()
        places = e.ids_by_place()
        assert sorted(chain(*places)) == sorted(e.scheduler.requests)
        assert e.scheduler.get_request_counts() == (len(places[0]), len(places[1]) + len(places[2]))
    for request in waiting:
        make_ready(request)
    finish_all(e)


def begin_session(engine, name):
    """A request whose client sends its prompt in turns; its first turn is answered."""
    request = engine.submit(name, 2 * BLOCK, 3)
    request.resumable, request.streaming_queue = True, deque()
    while request.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        engine.step()
    del engine.outcomes[name]  # there is an answer to each turn
    return request


def next_turn(engine, name, prompt_tokens):
    turn = Request(
        request_id=name,
        prompt_token_ids=[7] * prompt_tokens,
        sampling_params=SamplingParams(max_tokens=4, stop_token_ids=[1]),
        pooling_params=None,
        resumable=True,
    )
    engine.scheduler.add_request(turn)


def test_a_session_waits_for_its_next_turn_beside_our_queue(engine):
    e = engine()
    begin_session(e, "session")
    e.submit("other", BLOCK, 3)
    while "other" not in e.outcomes:
        e.step()
    assert e.ids_by_place() == [[], [], ["session"]]
    assert e.num_free_blocks < e.options.usable_blocks


def test_a_session_whose_next_turn_never_fits_is_ended(engine):
    e = engine(num_blocks=11)
    begin_session(e, "session")
    next_turn(e, "session", 10 * BLOCK)
    e.submit("other", BLOCK, 3)
    finish_all(e)
    assert e.outcomes["session"].finish_reason == "error"
    assert "pool has 10 of 16 tokens" in e.outcomes["session"].stop_reason
    assert e.outcomes["other"].finish_reason == "stop"

"""What the contracts do not see of the production queue: what it remembers from one look to the next."""

from __future__ import annotations

import pytest

from batchjob_scheduler.config import BatchJobConfig
from batchjob_scheduler.queue import BatchJobQueue
from batchjob_testkit.fakes import FakeEngine, FakeRequest

BLOCK = 16


def test_outside_a_step_a_decode_alone_changes_the_choice():
    """Q2: the queue, the free blocks and what runs are the same, but the next step needs a block (V1)."""
    engine = FakeEngine(usable_blocks=4)
    queue = BatchJobQueue(BatchJobConfig(look_ahead=False, reserve_margin_blocks=0), engine)
    queue.add_request(FakeRequest("runs", 2 * BLOCK - 2, max_tokens=9))
    engine.start(queue.pop_request())
    queue.add_request(FakeRequest("waits", 2 * BLOCK, max_tokens=9))
    free = engine.free_blocks()
    assert queue
    engine.step(engine.running()[0])
    assert engine.free_blocks() == free
    assert not queue


def test_what_is_taken_and_put_back_costs_its_job_no_turn():
    """O5b: a request that the engine passes over in every step does not move its job behind the others."""
    engine = FakeEngine(usable_blocks=400)
    queue = BatchJobQueue(BatchJobConfig(order="blend"), engine)
    for number in range(9):
        queue.add_request(FakeRequest(f"#job_name[news]#{number}", BLOCK, max_tokens=9))
    (news,) = queue.jobs
    before = news.turn
    for _ in range(3):
        taken = queue.pop_request()
        assert news.turn > before
        queue.prepend_requests([taken])
        assert news.turn == before


@pytest.mark.parametrize("hand_over", ["add_request", "prepend_request"])
def test_what_waits_already_is_not_taken_in_twice(hand_over):
    queue = BatchJobQueue(BatchJobConfig(), FakeEngine(usable_blocks=100))
    request = FakeRequest("once", BLOCK, max_tokens=9)
    queue.add_request(request)
    getattr(queue, hand_over)(request)
    assert (len(queue), list(queue)) == (1, [request])
    assert queue.pop_request() is request
    assert (len(queue), bool(queue)) == (0, False)


# --- sessions, which come back as arrivals ------------------------------------------------------------


def turn_ends(engine, request, *, output_tokens):
    """The session waits for its next turn, without its blocks."""
    request.num_output_tokens = output_tokens
    engine.finish(request)
    request.num_computed_tokens = 0


def test_the_next_turn_of_a_session_needs_room_for_what_was_said_before():
    engine = FakeEngine(usable_blocks=10)
    queue = BatchJobQueue(BatchJobConfig(look_ahead=False, reserve_margin_blocks=0), engine)
    session = FakeRequest("session", BLOCK, max_tokens=4096)
    queue.add_request(session)
    engine.start(queue.pop_request())
    turn_ends(engine, session, output_tokens=9 * BLOCK)
    engine.withhold(1)
    running = FakeRequest("running", 2, max_tokens=9)
    engine.start(running)
    queue.add_request(session)
    assert not queue, "8 blocks are free, it needs 10"
    engine.finish(running)
    engine.withhold(0)
    assert queue.peek_request() is session


def test_a_session_that_was_once_preempted_takes_an_ordinary_place_in_its_next_turn():
    engine = FakeEngine(usable_blocks=100)
    queue = BatchJobQueue(BatchJobConfig(), engine)
    for number in range(3):  # a job of which nothing is known takes its first three in their order
        queue.add_request(FakeRequest(str(number), BLOCK, max_tokens=9))
        queue.pop_request()
        queue.end(str(number), by_itself=True)
    session = FakeRequest("session", BLOCK, max_tokens=9)
    queue.add_request(session)
    engine.start(queue.pop_request())
    engine.preempt(session)
    queue.prepend_request(session)
    engine.start(queue.pop_request())
    turn_ends(engine, session, output_tokens=2)
    queue.add_request(session)
    longer = FakeRequest("longer", 5 * BLOCK, max_tokens=9)
    queue.add_request(longer)
    assert queue.peek_request() is longer


def test_the_next_turn_of_a_session_is_predicted_by_its_own_cap():
    """V5: as long as its job is unknown, what runs goes on to its cap, which each turn has anew."""
    engine = FakeEngine(usable_blocks=20)
    queue = BatchJobQueue(BatchJobConfig(), engine)
    session = FakeRequest("session", BLOCK, max_tokens=300)
    session.resumable = True
    queue.add_request(session)
    engine.start(queue.pop_request())
    queue.add_request(FakeRequest("waits", BLOCK, max_tokens=9))
    assert not queue
    session.max_tokens = 10
    assert queue

"""What the contracts do not see of the production queue: what it remembers from one look to the next."""

from __future__ import annotations

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

"""What vllm-ascend demands of its own scheduler, where no other test of ours demands the same.

``docs/reference/vllm-ascend-demands.md`` has the whole list.
"""

from __future__ import annotations

import pytest

from batchjob_scheduler.config import BatchJobConfig
from batchjob_scheduler.estimator import DecodeLengthEstimator
from batchjob_scheduler.queue import BatchJobQueue
from batchjob_testkit.fakes import FakeEngine, FakeRequest


def test_a_job_of_one_length_is_predicted_that_length():
    estimator = DecodeLengthEstimator(alpha=0.1)
    for _ in range(50):
        estimator.observe(100)
    assert estimator.predicted_tokens == 100


@pytest.mark.parametrize(
    ("max_jobs", "lengths"),
    [(20, {"long": 500, "short": 10}), (0, {f"job {number}": number + 1 for number in range(50)})],
    ids=["two of twenty", "without a limit"],
)
def test_each_job_is_learnt_by_itself(max_jobs, lengths):
    queue = BatchJobQueue(BatchJobConfig(max_jobs=max_jobs), FakeEngine(usable_blocks=100))
    for job, decoded in lengths.items():
        request = FakeRequest(f"#job_name[{job}]#1", num_prompt_tokens=8, max_tokens=600)
        queue.add_request(request)
        request.num_output_tokens = decoded
        queue.end(request.request_id, by_itself=True)
    assert {job.name: job.estimator.predicted_tokens for job in queue.jobs} == lengths


@pytest.mark.parametrize("take", ["peek_request", "pop_request"])
def test_an_empty_queue_has_nothing_to_offer(take):
    queue = BatchJobQueue(BatchJobConfig(), FakeEngine(usable_blocks=100))
    assert not queue
    with pytest.raises(IndexError, match="0 wait"):
        getattr(queue, take)()


def test_while_the_pool_is_full_nothing_is_offered():
    engine = FakeEngine(usable_blocks=4)
    queue = BatchJobQueue(BatchJobConfig(), engine)
    assert engine.start(FakeRequest("fills it", num_prompt_tokens=64, max_tokens=8))
    queue.add_request(FakeRequest("waits", num_prompt_tokens=8, max_tokens=8))
    assert not queue
    assert len(queue) == 1

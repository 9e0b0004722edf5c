"""What the strategies make can be used as it is, and shrinks to what matters."""

from __future__ import annotations

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from batchjob_testkit import strategies
from batchjob_testkit.bench import Bench
from batchjob_testkit.events import Admit, Arrive, Preempt, play
from batchjob_testkit.history import History
from batchjob_testkit.queues import SpecQueue
from batchjob_testkit.workloads import Workload, WorkloadRequest

SEARCH = settings(max_examples=3000, database=None, derandomize=True)


def bench():
    def make(engine, chosen, policy):
        return SpecQueue(engine, chosen, priority_policy=policy)

    return Bench(make, History("a history"), usable_blocks=24)


@given(strategies.histories())
def test_every_history_can_be_played_and_the_ledger_is_whole(history):
    b = bench()
    play(history, b)
    b.engine.check_integrity()


def test_a_history_shrinks_to_the_events_that_matter():
    def preempts(history):
        b = bench()
        play(history, b)
        return any(request.num_preemptions for request in b.queue)

    assert find(strategies.histories(), preempts, settings=SEARCH) == [
        Arrive("news", 1),
        Admit(),
        Preempt(0),
    ]


def test_a_workload_shrinks_to_one_short_request():
    found = find(strategies.workloads(), lambda workload: len(workload.requests) > 0, settings=SEARCH)
    assert found == Workload(512, (WorkloadRequest(found.requests[0].job, 1, 1),))


@given(st.data(), st.integers(2, 600))
def test_a_workload_fits_the_model(data, max_model_len):
    workload = data.draw(strategies.workloads(max_model_len))
    for request, fake in zip(workload.requests, workload.fake_requests(), strict=True):
        assert fake.num_prompt_tokens + fake.max_tokens <= max_model_len
        assert f"#job_name[{request.job}]#" in fake.request_id


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((0, 5), "request 1 of job 'news': prompt_tokens is 0, allowed: at least 1"),
        ((5, 0), "request 1 of job 'news': output_tokens is 0, allowed: at least 1"),
        ((5, -1), "request 1 of job 'news': output_tokens is -1, allowed: at least 1"),
        ((101, 1), "prompt_tokens 101 \\+ output_tokens 1 is 102, allowed: up to max_model_len 100"),
        ((60, 41), "prompt_tokens 60 \\+ output_tokens 41 is 101, allowed: up to max_model_len 100"),
    ],
)
def test_impossible_lengths_are_refused_where_they_are_made(lengths, message):
    possible = WorkloadRequest("news", 60, 40)
    with pytest.raises(ValueError, match=message):
        Workload(100, (possible, WorkloadRequest("news", *lengths)))

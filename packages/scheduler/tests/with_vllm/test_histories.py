"""The production classes keep every rule over random histories of vLLM's real scheduler.

Here only a few histories, long enough to meet every event; ``nox -s properties`` runs many more.
"""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from vllm.v1.core.sched.scheduler import Scheduler

from batchjob_scheduler.queue import BatchJobQueue
from batchjob_scheduler.scheduler import BatchJobAwareAsyncScheduler, BatchJobAwareScheduler
from batchjob_testkit.vllm_histories import History, run_histories

pytestmark = pytest.mark.vllm

CLASSES = pytest.mark.parametrize("scheduler_cls", [BatchJobAwareScheduler, BatchJobAwareAsyncScheduler])
EVENTS = {"step", "submit", "abort", "finish_transfer", "compile_grammar", "reset_prefix_cache", "pause"}


@CLASSES
def test_histories_keep_the_rules_and_come_to_an_end(scheduler_cls):
    happened = run_histories(scheduler_cls, 4_000, seed=0, rules=True)
    assert happened.keys() >= EVENTS


@CLASSES
def test_short_histories_that_shrink(scheduler_cls):
    @hypothesis_settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def every_history_ends_well(random):
        History(scheduler_cls, random, rules=True).run(25)

    every_history_ends_well()


# --- broken queues are found, whatever the rules say of them -------------------------------------------


class LosesWhatIsPutBack(BatchJobQueue):
    def prepend_requests(self, requests):
        pass


class TakesAnotherThanItOffered(BatchJobQueue):
    def pop_request(self):
        self._offered = None
        entries = [entry for entry in self._entries.values() if entry.waiting]
        self._offered = entries[-1] if entries else None
        return super().pop_request()


class NeverFailsWhatCannotFit(BatchJobQueue):
    def unservable(self):
        return []


class CountsWrongly(BatchJobQueue):
    def __len__(self):
        return max(0, super().__len__() - 1)


class OffersTheShortest(BatchJobQueue):
    def _first_that_fits(self, level, limit, budget):
        chosen = super()._first_that_fits(level, limit, budget)
        waiting = [e for e in self._entries.values() if e.waiting and e.need_tokens <= limit]
        return chosen and min(waiting, key=lambda e: e.need_tokens, default=chosen)


@pytest.mark.parametrize(
    ("queue_cls", "rules"),
    [
        (LosesWhatIsPutBack, False),
        (TakesAnotherThanItOffered, False),
        (NeverFailsWhatCannotFit, False),
        (CountsWrongly, False),
        (OffersTheShortest, True),
    ],
)
def test_a_broken_queue_is_found_and_the_seed_is_a_command(monkeypatch, queue_cls, rules):
    monkeypatch.setattr("batchjob_scheduler.scheduler.BatchJobQueue", queue_cls)
    command = r"python -m batchjob_testkit.vllm_histories --scheduler \S+ --events 1 --seed (\d+)"
    with pytest.raises(AssertionError, match=command) as failure:
        run_histories(BatchJobAwareScheduler, 20_000, seed=0, rules=rules)
    seed = re.search(command, str(failure.value))[1]
    with pytest.raises(AssertionError, match=command):
        run_histories(BatchJobAwareScheduler, 1, seed=int(seed), rules=rules)


def test_vllms_own_scheduler_passes_but_for_what_can_never_fit():
    """The generator is right: what fails on vLLM's own scheduler is its fault, or a larger request."""
    ample = [
        history
        for seed in range(40)
        if (history := History(Scheduler, Random(seed), rules=False)).options.usable_blocks >= 60
    ]
    assert ample
    for history in ample:
        history.run(200)

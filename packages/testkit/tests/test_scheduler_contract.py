"""The fake engine core satisfies the scheduler contract under each queue, and broken ones are rejected."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

import pytest

from batchjob_scheduler.config import BatchJobConfig
from batchjob_scheduler.queue import BatchJobQueue
from batchjob_testkit.engines import EngineLimits, Outcome
from batchjob_testkit.fakes import FakeEngineCore, FCFSQueue
from batchjob_testkit.queues import SpecQueue
from batchjob_testkit.scheduler_contracts import EngineBench, SchedulerContract


def spec_queue(engine, settings, priority_policy):
    return SpecQueue(engine, settings, priority_policy=priority_policy)


def production_queue(engine, settings, priority_policy):
    return BatchJobQueue(BatchJobConfig(**asdict(settings)), engine, priority_policy=priority_policy)


class TestPlainQueue(SchedulerContract):
    claims_p2 = False

    @pytest.fixture
    def make_engine(self):
        return partial(FakeEngineCore, FCFSQueue)


class TestSpecification(SchedulerContract):
    random_batches = 30

    @pytest.fixture
    def make_engine(self):
        return partial(FakeEngineCore, spec_queue)


class TestProductionQueue(SchedulerContract):
    @pytest.fixture
    def make_engine(self):
        return partial(FakeEngineCore, production_queue)


# --- mutants -----------------------------------------------------------------------------------------


class LosesWhatComesBack(FCFSQueue):
    def prepend_request(self, request):
        pass


class NeverAdmitsWhatWaits(FCFSQueue):
    def __bool__(self):
        return False


class ForgetsTheAborted(FCFSQueue):
    """An abort leaves the request in the queue, so it runs although it was answered."""

    def remove_requests(self, requests):
        pass


class OffersWhatRuns(FCFSQueue):
    def pop_request(self):
        return self.peek_request()


class ResumesWithoutItsLastToken(FCFSQueue):
    def prepend_request(self, request):
        request.num_output_tokens = max(0, request.num_output_tokens - 1)
        super().prepend_request(request)


class NamesWhatFits(FCFSQueue):
    """Fails what takes more than an eighth of the pool."""

    def __init__(self, engine, *rest):
        super().__init__(engine, *rest)
        self.most_tokens = engine.usable_blocks * engine.block_size // 8

    def unservable(self):
        return [request for request in self if request.num_tokens > self.most_tokens]


class LeaksOnAbort(FakeEngineCore):
    def abort(self, request_id):
        request = self.requests.get(request_id)
        if request in self.engine.running():
            self.engine.running().remove(request)
        super().abort(request_id)


class AnswersTwice(FakeEngineCore):
    def abort(self, request_id):
        self.answers.append((request_id, Outcome((), "abort", None)))
        super().abort(request_id)


def exceeds_the_token_budget(limits):
    return FakeEngineCore(limits=replace(limits, max_num_batched_tokens=limits.max_num_batched_tokens + 1))


def runs_one_too_many(limits):
    return FakeEngineCore(limits=replace(limits, max_num_seqs=limits.max_num_seqs + 1))


def chunks_prompts_anyway(limits):
    return FakeEngineCore(limits=replace(limits, enable_chunked_prefill=True))


def ignores_priorities(limits):
    return FakeEngineCore(limits=replace(limits, policy="fcfs"))


def keeps_a_block_back(limits):
    return FakeEngineCore(limits=replace(limits, num_blocks=limits.num_blocks - 1))


def over(make_queue):
    """Engines over a broken queue."""
    return partial(FakeEngineCore, make_queue)


def of(engine_class):
    """Broken engines over the plain queue."""
    return partial(engine_class, FCFSQueue)


MUTANTS = {
    "loses what comes back": (
        over(LosesWhatComesBack),
        "P1: it goes on",
        "p3_a_resumed_request_loses_no_token",
    ),
    "never admits what waits": (
        over(NeverAdmitsWhatWaits),
        "P1: it goes on",
        "p1_an_engine_that_was_idle_runs_again",
    ),
    "forgets the aborted": (
        over(ForgetsTheAborted),
        "Q1: the queue offers .* which is over",
        "p3_an_abort_while_waiting_loses_nothing_else",
    ),
    "offers what runs": (
        over(OffersWhatRuns),
        "Q1: the queue offers .* which runs",
        "p1_an_engine_that_was_idle_runs_again",
    ),
    "resumes without its last token": (
        over(ResumesWithoutItsLastToken),
        "P3: the tokens of",
        "p3_a_resumed_request_loses_no_token",
    ),
    "waits for ever for what never fits": (
        over(FCFSQueue),
        "P1: it goes on",
        "p2_what_can_never_fit_fails_with_a_reason_and_the_rest_go_on",
    ),
    "fails what fits": (
        over(NamesWhatFits),
        "P3: how .* ends",
        "p3_a_resumed_request_loses_no_token",
    ),
    "leaks on abort": (
        of(LeaksOnAbort),
        "blocks: all are free while nothing runs",
        "p3_an_abort_while_running_loses_nothing_else",
    ),
    "answers twice": (
        of(AnswersTwice),
        "P3: one answer each",
        "p3_an_abort_while_running_loses_nothing_else",
    ),
    "exceeds the token budget": (
        exceeds_the_token_budget,
        "limits: max_num_batched_tokens",
        "limits_a_tiny_token_budget_is_kept",
    ),
    "runs one too many": (runs_one_too_many, "limits: max_num_seqs", "limits_no_more_run_than_allowed"),
    "chunks prompts anyway": (
        chunks_prompts_anyway,
        "limits: .* of a prompt",
        "limits_without_chunked_prefill_a_prompt_is_computed_in_one_step",
    ),
    "ignores priorities": (
        ignores_priorities,
        "O0",
        "o0_the_more_urgent_request_runs_first_under_its_policy",
    ),
    "keeps a block back": (
        keeps_a_block_back,
        "blocks: all are free while nothing runs",
        "p1_an_engine_that_was_idle_runs_again",
    ),
}


def bench_of(make_engine):
    """What the fixture ``bench`` of the contract is for a sound factory."""

    def make_bench(**given_limits):
        limits = EngineLimits(**given_limits)
        return EngineBench(make_engine(limits), limits)

    return make_bench


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_scheduler_is_rejected_by_the_rule_that_it_breaks(name):
    make_engine, rule, test = MUTANTS[name]
    with pytest.raises(AssertionError, match=rf"^{rule}"):
        getattr(SchedulerContract(), f"test_{test}")(bench_of(make_engine))


def test_a_failure_shows_the_rule_the_history_and_both_sides():
    with pytest.raises(AssertionError) as failure:
        SchedulerContract().test_limits_a_tiny_token_budget_is_kept(bench_of(exceeds_the_token_budget))
    first, *rest = str(failure.value).splitlines()
    assert first == "limits: max_num_batched_tokens: observed 9, expected 8"
    assert "  Submit(request_id='000', prompt_tokens=1, decode_tokens=10, max_tokens=10, priority=0)" in rest
    assert any(line.startswith("  step {'000': 1, '001': 8}") for line in rest)

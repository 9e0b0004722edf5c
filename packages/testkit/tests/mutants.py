"""Broken queues, estimators and reservations, one per kind of fault, with the test that rejects each.

Each is the specification with one fault: a subclass, or one of its functions replaced. The classes
``Test...`` at the end are collected only when this file is given to pytest by name.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from batchjob_spec import estimator, jobs, ordering, queue, reservation
from batchjob_testkit.contracts import BlendingQueueContract, EstimatorContract, ReservationContract
from batchjob_testkit.estimators import SpecEstimator
from batchjob_testkit.queues import SpecQueue
from batchjob_testkit.reservations import SpecReservation


@dataclass(frozen=True)
class Mutant:
    """A broken implementation, and the contract's test that must reject it."""

    contract: type
    rejected_by: str
    broken: type
    replaced: tuple = ()  # module, name of a function, function


MUTANTS = {}


def breaks(rejected_by):
    """Registers a broken class under the test that rejects it."""

    def register(cls):
        contract, _ = KINDS[cls.__mro__[1]]
        MUTANTS[cls.__name__] = Mutant(contract, f"test_{rejected_by}", cls)
        return cls

    return register


def replaces(rejected_by, module, name):
    """Registers the specification's queue with one function replaced."""

    def register(function):
        words = "".join(word.title() for word in function.__name__.split("_"))
        replaced = (module, name, function)
        MUTANTS[words] = Mutant(BlendingQueueContract, f"test_{rejected_by}", SpecQueue, replaced)
        return function

    return register


KINDS = {
    SpecQueue: (BlendingQueueContract, "make_queue"),
    SpecEstimator: (EstimatorContract, "make_estimator"),
    SpecReservation: (ReservationContract, "make_reservation"),
}

# --- queues: Q --------------------------------------------------------------------------------------------


@breaks("q1_every_request_is_popped_once")
class DoublePop(SpecQueue):
    def pop_request(self):
        return self.peek_request()


@breaks("q1_what_comes_back_is_in_the_queue_again")
class LostOnPrepend(SpecQueue):
    def prepend_requests(self, requests):
        self.prepend_request(next(iter(requests)))


@breaks("q1_what_is_added_twice_is_there_once")
class AddsTwice(SpecQueue):
    def __iter__(self):
        return itertools.chain(super().__iter__(), self.again)

    def __len__(self):
        return super().__len__() + len(self.again)

    def add_request(self, request):
        self.again = [request] if self._state.find(request.request_id) else []
        super().add_request(request)


@breaks("q2_peek_sees_that_the_pool_has_shrunk")
class StalePeek(SpecQueue):
    def peek_request(self):
        if self._peeked is None:
            super().peek_request()
        return self._requests[self._peeked]


@breaks("q2_a_request_aborted_after_the_peek_is_never_offered")
class OffersTheAborted(SpecQueue):
    def remove_requests(self, requests):
        peeked = self._peeked
        super().remove_requests(requests)
        self._peeked = peeked


@breaks("q2_pop_takes_what_peek_showed_though_a_better_one_arrived")
class PopChoosesAnew(SpecQueue):
    def pop_request(self):
        self._peeked = None
        return super().pop_request()


@breaks("q3_removing_one_that_is_not_there_changes_nothing")
class RaisesOnAbsent(SpecQueue):
    def remove_request(self, request):
        del self._requests[request.request_id]
        super().remove_request(request)


@breaks("q4_len_counts_all_and_bool_says_whether_one_is_admissible")
class CountsOnlyTheAdmissible(SpecQueue):
    def __len__(self):
        state = self.state
        return len(queue.admissible(state, queue.budget_tokens(state)))


@breaks("q5_the_same_events_lead_to_the_same_choices")
class DependsOnFormerQueues(SpecQueue):
    made = itertools.count()

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.turn = next(self.made) % 2

    def _offer(self):
        state = self.state
        fitting = queue.admissible(state, queue.budget_tokens(state))
        return fitting[-self.turn].request.request_id if fitting else super()._offer()


# --- queues: order ----------------------------------------------------------------------------------------


@replaces("o0_priority_comes_first_under_its_policy_only", ordering, "probe_key")
def priority_ignored(priority, arrival):
    return (0, ordering.Tier.PROBE, arrival)


@replaces("o1_the_preempted_come_first_in_the_order_of_their_preemption", ordering, "preempted_key")
def preempted_not_first(priority, preempted_at):
    return (priority, ordering.Tier.REGULAR + 1, preempted_at)


@breaks("o2_a_probe_that_does_not_fit_is_passed_over")
class ProbeIgnoresFit(SpecQueue):
    def _offer(self):
        state = self.state
        probes = [m for m in state.waiting if queue.order_key(state, m)[1] == ordering.Tier.PROBE]
        return probes[0].request.request_id if probes else super()._offer()


@replaces("o2_a_drained_job_does_not_probe_again", ordering, "is_probe")
def probes_for_ever(ordinal, observations, started):
    return True


@replaces("o4_the_threshold_itself_is_little", ordering, "class_rank")
def order_flips_at_the_threshold(short, budget, low_available_tokens_threshold):
    return int(short == (budget >= low_available_tokens_threshold))


@replaces("o5_the_longest_need_first_and_equal_needs_in_order", ordering, "regular_key")
def unfair_tie(priority, rank, predicted, job_appeared, need, arrival):
    return (priority, ordering.Tier.REGULAR, rank, -predicted, job_appeared, -need, -arrival)


@replaces("o5c_needs_are_taken_as_they_are_spread", ordering, "place_in_turn")
def blend_takes_the_longest(started, waiting):
    return waiting - 1


@replaces("o5c_each_eighth_is_the_shortest", ordering, "place_in_turn")
def blend_steps_on(started, waiting):
    return started * ordering.GOLDEN_SECTION % ordering.ONE * waiting // ordering.ONE


@replaces("o5c_if_it_does_not_fit_the_longest_that_fits", queue, "need_in_turn")
def blend_takes_what_fits_only(state, member):
    needs = sorted(queue.need_tokens(other) for other in queue.admissible(state, queue.budgets(state)[0]))
    return needs[ordering.place_in_turn(state.job_of(member).started, len(needs))]


@breaks("o6_nothing_that_fits_waits_behind_what_does_not")
class WaitsForTheFirst(SpecQueue):
    def _offer(self):
        state, offered = self.state, super()._offer()
        order = sorted(state.waiting, key=lambda member: queue.order_key(state, member))
        return offered if order and order[0].request.request_id == offered else None


# --- queues: reservation and progress -----------------------------------------------------------------------


@replaces("v2_the_reserve_keeps_what_runs_supplied", queue, "reserved_blocks")
def admits_over_budget(state):
    return 0


@replaces("p1_an_idle_engine_does_not_wait_for_a_margin", queue, "budgets")
def livelock(state):
    return (queue.budget_tokens(state),)


@replaces("p1_an_idle_engine_does_not_wait_for_a_margin", queue, "blocks_for")
def off_by_one_block(tokens, block_size):
    return tokens // block_size + 1


@breaks("p2_what_can_never_fit_is_named_and_the_rest_go_on")
class NamesNoneAsUnservable(SpecQueue):
    def unservable(self):
        return []


@replaces("p4_no_loop_of_preemption_and_admission", queue, "is_held_back")
def readmits_at_once(state, member):
    return False


# --- queues: jobs and what is learnt ------------------------------------------------------------------------


@breaks("j4_no_number_of_jobs_is_an_error")
class JobCapRaises(SpecQueue):
    def add_request(self, request):
        super().add_request(request)
        table = self._state.jobs
        if table.displaced:
            raise ValueError(f"more than {table.max_jobs} jobs")


@breaks("j4_a_displaced_job_gets_its_place_when_one_is_free")
class LeaksAPlaceOnAbort(SpecQueue):
    def end(self, request_id, *, by_itself):
        if by_itself:
            super().end(request_id, by_itself=True)


@replaces("j4_the_job_least_recently_used_gives_up_its_place", jobs, "idle_jobs")
def the_oldest_job_gives_up_its_place(table, live):
    return tuple(job for job in table.tracked if job.name not in live and job.name != jobs.DEFAULT_JOB)


@replaces("j2_extra_arguments_name_the_job", jobs, "job_name")
def reads_only_the_tag(request_id, extra_args=None):
    return jobs.tagged_job(request_id) or jobs.DEFAULT_JOB


@breaks("e3_only_requests_that_ended_by_themselves_are_observed")
class ObservesAborts(SpecQueue):
    def end(self, request_id, **_):
        super().end(request_id, by_itself=True)


def frozen(estimate, decoded_tokens, alpha=0.1, _observe=estimator.observe):
    return estimate if estimate.observations >= 10 else _observe(estimate, decoded_tokens, alpha)


@replaces("e2_an_estimate_never_freezes", estimator, "observe")
def frozen_estimate(estimate, decoded_tokens, alpha):
    return frozen(estimate, decoded_tokens, alpha)


# --- estimators -------------------------------------------------------------------------------------------


@breaks("e1_a_job_without_observations_is_predicted_128_tokens")
class ColdStartOfNothing(SpecEstimator):
    def predicted_tokens(self):
        return super().predicted_tokens() if self.estimate.observations else 1


@breaks("e2_the_first_observation_is_the_estimate")
class AveragesWithTheColdStart(SpecEstimator):
    def __init__(self, alpha):
        super().__init__(alpha)
        self.observe(128)


@breaks("e2_it_never_stops_learning")
class FreezesAfterTen(SpecEstimator):
    def observe(self, decoded_tokens):
        self.estimate = frozen(self.estimate, decoded_tokens, self.alpha)


@breaks("e4_a_prediction_is_rounded_down")
class RoundsUp(SpecEstimator):
    def predicted_tokens(self):
        return -int(-self.estimate.tokens // 1)


@breaks("e4_a_prediction_is_within_the_limits_of_the_request")
class IgnoresTheLengthCap(SpecEstimator):
    def remaining_tokens(self, output_tokens, min_tokens, _):
        return super().remaining_tokens(output_tokens, min_tokens, max_tokens=2**30)


@breaks("e5_what_runs_is_predicted_to_decode_at_least_one_more")
class ForetellsAnEndInThePast(SpecEstimator):
    def remaining_tokens(self, output_tokens, min_tokens, max_tokens):
        return super().remaining_tokens(0, min_tokens, max_tokens) - output_tokens


# --- reservations -----------------------------------------------------------------------------------------


@breaks("v1_look_ahead_slots_are_counted")
class ForgetsLookAhead(SpecReservation):
    def next_step_blocks(self, request):
        tokens, limit = (request.num_computed_tokens, request.num_tokens), self.engine.step_tokens
        return reservation.next_step_blocks(*tokens, limit, 0, self.engine.block_size)


@breaks("v1_a_request_takes_a_block_when_its_token_after_the_next_opens_one")
class OneStepTooSoon(SpecReservation):
    def next_step_blocks(self, request):
        size = self.engine.block_size
        return reservation.blocks_added(request.num_computed_tokens, 1, size)


@breaks("v1_a_chunked_prefill_takes_its_next_chunk")
class ForgetsChunkedPrefill(SpecReservation):
    def next_step_blocks(self, request):
        return min(1, super().next_step_blocks(request))


@breaks("v2_the_reserve_is_the_need_and_a_margin_up_to_a_limit")
class ReservesWithoutLimit(SpecReservation):
    def budget_tokens(self):
        reserved = sum(map(self.next_step_blocks, self.engine.running()))
        reserved += self.settings.reserve_margin_blocks
        return reservation.budget_tokens(self.engine.free_blocks(), reserved, self.engine.block_size)


@breaks("v3_the_budget_is_never_negative")
class NegativeBudget(SpecReservation):
    def budget_tokens(self):
        margin = self.settings.reserve_margin_blocks
        short = self.engine.free_blocks() - margin
        return super().budget_tokens() if short >= 0 else short * self.engine.block_size


@breaks("v3_the_budget_follows_the_pool")
class RemembersThePool(SpecReservation):
    def __init__(self, engine, settings):
        super().__init__(engine, settings)
        self.budget = super().budget_tokens()

    def budget_tokens(self):
        return self.budget


@breaks("v5_the_peak_is_held_just_before_a_request_ends")
class AddsUpAllEnds(SpecReservation):
    def predicted_peak_tokens(self, running, candidate):
        return sum(held + remaining for held, remaining in (*running, candidate))


# --- what pytest collects ---------------------------------------------------------------------------------


def suite(mutant):
    """A test class that gives the broken implementation to its contract."""

    def make(self, monkeypatch):
        if mutant.replaced:
            monkeypatch.setattr(*mutant.replaced)
        if mutant.contract is BlendingQueueContract:
            return lambda engine, settings, policy: mutant.broken(engine, settings, priority_policy=policy)
        return mutant.broken

    return type("TestMutant", (mutant.contract,), {FIXTURES[mutant.contract]: pytest.fixture(make)})


FIXTURES = dict(KINDS.values())
for name, mutant in MUTANTS.items():
    globals()[f"Test{name}"] = suite(mutant)

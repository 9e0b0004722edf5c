"""What a waiting queue, an estimator and a reservation must do, as one class each to subclass.

.. code-block:: python

    class TestMyQueue(QueueContract):
        @pytest.fixture
        def make_queue(self):
            return lambda engine, settings, priority_policy: MyQueue(engine, settings)

Each test is named by the rule that it checks. A failure says the rule, both sides and what happened
before. The last test of a suite lets Hypothesis look for the shortest history that breaks a rule.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from fractions import Fraction
from math import floor
from typing import Any, ClassVar

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from batchjob_spec.queue import Settings
from batchjob_testkit.bench import BLOCK, Bench
from batchjob_testkit.estimators import Estimator, EstimatorFactory
from batchjob_testkit.factories import checked, must_be_overridden
from batchjob_testkit.fakes import FakeEngine, FakeRequest, FakeSamplingParams
from batchjob_testkit.history import History, Recorded, about, rule_of
from batchjob_testkit.queues import RequestQueue, WaitingQueue
from batchjob_testkit.reservations import HeldAndRemaining, Reservation, ReservationFactory
from batchjob_testkit.stateful import (
    FACTORY_OF_A_QUEUE,
    BlendLockstep,
    QueueFactory,
    QueueLockstep,
    lockstep,
)


def lockstep_examples() -> int:
    """How many random histories to run: BATCHJOB_LOCKSTEP_EXAMPLES, else as the Hypothesis profile says."""
    return int(os.environ.get("BATCHJOB_LOCKSTEP_EXAMPLES", hypothesis.settings().max_examples))


class Contract:
    """What the suites share. Subclass one of them, not this."""

    @pytest.fixture
    def history(self, request: pytest.FixtureRequest) -> History:
        """The history of one test; its name is the rule."""
        return History(rule_of(getattr(request.node, "originalname", request.node.name)))

    @pytest.fixture
    def seeded(self, request: pytest.FixtureRequest) -> Callable[[Any], Any]:
        """Lets Hypothesis search from ``--batchjob-seed``, where that is given."""
        seed = request.config.getoption("batchjob_seed", default=None)
        return (lambda search: search) if seed is None else hypothesis.seed(seed)

    def _not_overridden(self, fixture: str, what: str) -> NotImplementedError:
        return must_be_overridden(type(self), fixture, what)

    def _named(self, fixture: str) -> str:
        return f"{type(self).__name__}.{fixture}"


class RequestQueueContract(Contract):
    """Rules Q1 to Q3 as every queue of vLLM keeps them. Override :meth:`make_queue`."""

    shape: ClassVar[type] = RequestQueue

    @pytest.fixture
    def make_queue(self) -> Callable[[FakeEngine, Settings, bool], Any]:
        """The factory of the queue under test."""
        raise self._not_overridden("make_queue", FACTORY_OF_A_QUEUE)

    @pytest.fixture
    def new_queue(self, make_queue: Any) -> QueueFactory:
        """The factory, and one line for whatever is wrong with it."""
        return checked(make_queue, self._named("make_queue"), self.shape)

    @pytest.fixture
    def bench(self, new_queue: QueueFactory, history: History) -> Callable[..., Bench]:
        """Makes a bench with the queue under test."""
        return lambda **options: Bench(new_queue, history, **options)

    def test_q1_every_request_is_in_the_queue_exactly_once(self, bench: Any) -> None:
        b = bench()
        requests = [b.add("news"), b.add("chat"), b.add()]
        b.check(len(b.queue), 3)
        b.check(_names(b.queue), _names(requests))

    def test_q1_every_request_is_popped_once(self, bench: Any) -> None:
        b = bench()
        requests = [b.add("news") for _ in range(3)]
        b.check(_names(b.queue.pop_request() for _ in range(3)), _names(requests))
        b.check(len(b.queue), 0)

    def test_q1_what_comes_back_is_in_the_queue_again(self, bench: Any) -> None:
        b = bench()
        requests = [b.add("news") for _ in range(3)]
        taken = [b.queue.pop_request() for _ in range(2)]
        b.queue.prepend_requests(iter(taken))
        b.check(_names(b.queue), _names(requests))
        b.queue.prepend_request(b.queue.pop_request())
        b.check(_names(b.queue), _names(requests))

    def test_q2_pop_takes_what_peek_showed(self, bench: Any) -> None:
        b = bench()
        b.add("news")
        peeked = b.queue.peek_request()
        b.add("news", prompt=4 * BLOCK)
        b.check(b.queue.pop_request(), peeked)

    def test_q2_a_request_aborted_after_the_peek_is_never_offered(self, bench: Any) -> None:
        b = bench()
        requests = [b.add("news"), b.add("news")]
        aborted = b.queue.peek_request()
        b.queue.remove_requests([aborted])
        survivors = [request for request in requests if request is not aborted]
        b.check([b.queue.pop_request()], survivors)

    def test_q3_removing_what_is_not_there_changes_nothing(self, bench: Any) -> None:
        b = bench()
        popped, request = b.add(), b.add()
        b.check(b.queue.pop_request(), popped)
        b.queue.remove_requests([FakeRequest("stranger", 5, 5), popped])
        b.check(list(b.queue), [request])
        b.queue.remove_requests(iter([request]))
        b.queue.remove_requests([request])
        b.check(len(b.queue), 0)


class QueueContract(RequestQueueContract):
    """Rules J, E, V, O, Q and P of a waiting queue that knows jobs. Override :meth:`make_queue`."""

    shape = WaitingQueue

    # --- Q: the queue -----------------------------------------------------------------------------

    def test_q1_what_is_added_twice_is_there_once(self, bench: Any) -> None:
        b = bench()
        request = b.add("news")
        b.queue.add_request(request)
        b.check(len(b.queue), 1)
        b.check(list(b.queue), [request])

    def test_q2_pop_takes_what_peek_showed_though_a_better_one_arrived(self, bench: Any) -> None:
        b = bench(usable_blocks=10)
        b.teach("news", 10, 10, 10)
        b.add("news", prompt=2 * BLOCK)
        peeked = b.queue.peek_request()
        b.add("news", prompt=4 * BLOCK)
        b.check(b.queue.pop_request(), peeked)

    def test_q2_peek_sees_that_the_pool_has_shrunk(self, bench: Any) -> None:
        b = bench(usable_blocks=20, reserve_margin_blocks=0)
        b.add()
        b.admit()
        large, small = b.add(prompt=10 * BLOCK), b.add()
        b.check(b.offered(), large)
        b.withhold(15)
        b.check(b.offered(), small)

    def test_q3_removing_one_that_is_not_there_changes_nothing(self, bench: Any) -> None:
        b = bench()
        request = b.add()
        b.queue.remove_request(FakeRequest("stranger", 5, 5))
        b.check(list(b.queue), [request])
        b.queue.remove_request(request)
        b.queue.remove_request(request)
        b.check(len(b.queue), 0)

    def test_q4_len_counts_all_and_bool_says_whether_one_is_admissible(self, bench: Any) -> None:
        b = bench(usable_blocks=8, reserve_margin_blocks=0)
        b.check((len(b.queue), bool(b.queue)), (0, False))
        b.add(prompt=7 * BLOCK)
        b.check((len(b.queue), bool(b.queue)), (1, True))
        b.admit()
        b.add(prompt=7 * BLOCK)
        b.check((len(b.queue), bool(b.queue)), (1, False))
        b.check(b.peek_raises_index_error(), True)

    def test_q5_the_same_events_lead_to_the_same_choices(self, bench: Any, history: History) -> None:
        def choices() -> list[str]:
            b = bench()
            b.teach("news", 500, 400, 600)
            for job in ("news", "chat", "labels") * 4:
                b.add(job)
            return [request.request_id for request in b.admit_all()]

        first = choices()
        history.check(choices(), first)

    # --- O: the order -----------------------------------------------------------------------------

    def test_o0_priority_comes_first_under_its_policy_only(self, bench: Any) -> None:
        for policy, expected in ((True, 1), (False, 0)):
            b = bench(priority_policy=policy)
            requests = [b.add("news", priority=1), b.add("news", priority=-1)]
            b.check(b.offered(), requests[expected])

    def test_o1_the_preempted_come_first_in_the_order_of_their_preemption(self, bench: Any) -> None:
        b = bench()
        first, second, other = (b.add(prompt=n * BLOCK) for n in (1, 5, 9))
        b.admit_all()
        b.preempt(second)
        b.preempt(first)
        b.finish(other, 1)  # so that nothing is held back
        b.add(prompt=20 * BLOCK)
        b.check([b.admit(), b.admit()], [second, first])

    def test_v4_what_was_preempted_needs_room_for_its_output_too(self, bench: Any) -> None:
        b = bench(usable_blocks=20, reserve_margin_blocks=0)
        running, victim, other = (b.add(prompt=n * BLOCK - 5) for n in (8, 2, 1))
        b.admit_all()
        b.preempt(victim, output_tokens=10 * BLOCK)
        b.finish(other, 1)  # so that nothing is held back
        b.withhold(1)  # 11 blocks are free, it needs 12
        b.check(b.offered(), None)
        b.withhold(0)
        b.check(b.offered(), victim)
        b.check(b.engine.running(), [running])

    def test_o2_the_first_three_requests_of_an_unknown_job_come_first(self, bench: Any) -> None:
        b = bench()
        b.teach("news", 900, 900, 900)
        known = b.add("news", prompt=9 * BLOCK)
        unknown = [b.add("chat", prompt=n) for n in (1, 2, 3, 400)]
        b.check([b.admit() for _ in range(4)], [*unknown[:3], known])

    def test_o2_a_drained_job_does_not_probe_again(self, bench: Any) -> None:
        b = bench()
        b.teach("news", 900, 900, 900)
        b.teach("labels", 1, 1, 1)
        late = b.add("labels")
        long = b.add("news")
        b.check([b.admit(), b.admit()], [long, late])

    def test_o2_a_probe_that_does_not_fit_is_passed_over(self, bench: Any) -> None:
        b = bench(usable_blocks=12, reserve_margin_blocks=0)
        b.add("news")
        b.admit()
        b.add("chat", prompt=12 * BLOCK)
        fitting = b.add("chat", prompt=BLOCK)
        b.check(b.offered(), fitting)

    def test_o4_long_jobs_first_while_much_is_free_else_short_ones(self, bench: Any) -> None:
        b = bench(usable_blocks=1000, low_available_tokens_threshold=100 * BLOCK)
        b.teach("short", 3, 3, 3)
        b.teach("long", 500, 500, 500)
        short, long = b.add("short"), b.add("long")
        b.check(b.offered(), long)
        b.withhold(1000 - 101)  # the margin is 2, so 99 blocks are left
        running = b.add("chat")
        b.check([b.admit(), b.offered()], [running, short])

    def test_o4_the_threshold_itself_is_little(self, bench: Any) -> None:
        for threshold_blocks, expected in ((9, "long"), (10, "short")):
            b = bench(
                usable_blocks=12,
                reserve_margin_blocks=2,
                low_available_tokens_threshold=threshold_blocks * BLOCK,
            )
            b.teach("short", 3, 3, 3)
            b.teach("long", 500, 500, 500)
            requests = {job: b.add(job) for job in ("short", "long")}
            b.check(b.offered(), requests[expected])

    def test_o4_of_two_long_jobs_the_longer_one_then_the_older_one(self, bench: Any) -> None:
        b = bench()
        b.teach("first", 300, 300, 300)
        b.teach("second", 300, 300, 300)
        b.teach("longest", 700, 700, 700)
        of = {job: b.add(job) for job in ("second", "longest", "first")}
        b.check([b.admit() for _ in range(3)], [of["longest"], of["first"], of["second"]])

    def test_o5_the_longest_need_first_and_equal_needs_in_order(self, bench: Any) -> None:
        b = bench()
        b.teach("news", 9, 9, 9)
        requests = [b.add("news", prompt=prompt) for prompt in (20, 50, 20, 50, 70)]
        expected = [requests[position] for position in (4, 1, 3, 0, 2)]
        b.check([b.admit() for _ in range(5)], expected)

    def test_o6_nothing_that_fits_waits_behind_what_does_not(self, bench: Any) -> None:
        b = bench(usable_blocks=20, reserve_margin_blocks=0)
        b.teach("news", 900, 900, 900)
        b.teach("chat", 500, 500, 500)
        b.add("code", prompt=10 * BLOCK)
        b.admit()
        b.add("news", prompt=15 * BLOCK)
        b.add("chat", prompt=15 * BLOCK)
        small = b.add("chat", prompt=3 * BLOCK)
        b.check(b.offered(), small)

    # --- P: progress ------------------------------------------------------------------------------

    def test_p1_an_idle_engine_does_not_wait_for_a_margin(self, bench: Any) -> None:
        b = bench(usable_blocks=4, reserve_margin_blocks=64, reserve_max_blocks=64)
        request = b.add(prompt=4 * BLOCK)
        b.check(b.offered(), request)

    def test_p2_what_can_never_fit_is_named_and_the_rest_go_on(self, bench: Any) -> None:
        b = bench(usable_blocks=4)
        giant = b.add(prompt=4 * BLOCK + 1)
        small = b.add()
        b.check(b.queue.unservable(), [giant])
        b.check(len(b.queue), 2)
        b.check(b.admit_all(), [small])
        b.abort(giant)
        b.check(b.queue.unservable(), [])

    def test_p2_what_outgrew_the_pool_is_named_when_it_comes_back(self, bench: Any) -> None:
        b = bench(usable_blocks=4)
        request = b.add(prompt=3 * BLOCK)
        b.admit()
        b.preempt(request, output_tokens=BLOCK + 1)
        b.check(b.queue.unservable(), [request])
        b.check(b.offered(), None)

    def test_p4_no_loop_of_preemption_and_admission(self, bench: Any) -> None:
        b = bench(usable_blocks=10, reserve_margin_blocks=0)
        running, victim = b.add(prompt=5 * BLOCK), b.add(prompt=5 * BLOCK)
        b.check(b.admit_all(), [running, victim])
        b.preempt(victim, output_tokens=0)
        b.check(b.offered(), None)  # both are predicted to decode 128 tokens
        b.finish(running, 1)
        b.check(b.offered(), victim)

    # --- J and E: jobs and what is learnt of them ---------------------------------------------------

    def test_j2_extra_arguments_name_the_job(self, bench: Any) -> None:
        b = bench()
        b.teach("labels", 1, 1, 1)
        b.teach("news", 900, 900, 900)
        tagged = b.add("labels")
        named = b.add("labels", sampling_params=FakeSamplingParams(extra_args={"job_name": "news"}))
        b.check([b.admit(), b.admit()], [named, tagged])

    @pytest.mark.parametrize("max_jobs", [0, 1, 2])
    def test_j4_no_number_of_jobs_is_an_error(self, bench: Any, max_jobs: int) -> None:
        b = bench(max_jobs=max_jobs)
        requests = [b.add(f"job {number}") for number in range(30)]
        b.check(_names(b.admit_all()), _names(requests))
        for request in requests:
            b.finish(request, 5)
        for number in range(30):  # and one after the other
            b.teach(f"late job {number}", 5, 5)
        b.check(len(b.queue), 0)

    def test_j4_a_displaced_job_gets_its_place_when_one_is_free(self, bench: Any) -> None:
        b = bench(max_jobs=1)
        b.teach("__default__", 900, 900, 900)
        b.teach("first", 900)
        held = b.add("first")
        displaced = [b.add("second", prompt=n) for n in (1, 2, 3, 4, 5)]
        b.abort(held)
        # "second" has a place now, and its first requests are probes in their order of arrival; under
        # the default job the longest would come first.
        b.check(b.offered(), displaced[0])

    def test_j4_the_job_least_recently_used_gives_up_its_place(self, bench: Any) -> None:
        b = bench(max_jobs=2)
        b.teach("kept", 900, 900, 900)
        b.teach("given up", 500, 500, 500)
        b.teach("kept", 900)
        b.teach("new", 2000, 2000, 2000)
        kept, new = b.add("kept"), b.add("new")
        # Were "kept" forgotten, its request would be a probe and come first.
        b.check([b.admit(), b.admit()], [new, kept])

    def test_j4_what_runs_of_a_displaced_job_counts_as_started(self, bench: Any) -> None:
        b = bench(max_jobs=1)
        b.teach("__default__", 900, 900, 900)
        b.teach("first", 10)
        held = b.add("first")
        b.admit()
        for _ in range(3):
            b.add("second", prompt=BLOCK)
        large = [b.add("second", prompt=5 * BLOCK) for _ in range(3)]
        b.check([b.admit() for _ in range(3)], large)  # under the default job the longest come first
        b.finish(held, 10)
        unnamed = b.add("__default__")
        b.check(b.offered(), unnamed)  # the others are no probes: three of their job have started

    def test_e2_an_estimate_never_freezes(self, bench: Any) -> None:
        b = bench()
        b.teach("changed", *[10] * 10, *[2000] * 50)
        b.teach("middle", *[1000] * 3)
        b.add("middle")
        changed = b.add("changed")
        b.check(b.offered(), changed)

    def test_e3_only_requests_that_ended_by_themselves_are_observed(self, bench: Any) -> None:
        b = bench()
        b.teach("aborted", 300, 300, 300)
        b.teach("steady", 200, 200, 200)
        for _ in range(50):
            request = b.add("aborted")
            b.admit()
            b.finish(request, 1, by_itself=False)
        b.add("steady")
        aborted = b.add("aborted")
        b.check(b.offered(), aborted)

    def test_e4_a_prediction_is_rounded_down(self, bench: Any) -> None:
        b = bench(usable_blocks=20, short_decode_token_threshold=32)
        b.teach("shorter", 31, 31, 31)
        b.teach("just short", 32, 32, 41)  # 0.9 * 32 + 0.1 * 41 = 32.9
        b.add("shorter")
        short = b.add("just short")
        b.check(b.offered(), short)  # both are short, and of these the longer comes first

    # --- V: the reservation -------------------------------------------------------------------------

    def test_v2_the_reserve_keeps_what_runs_supplied(self, bench: Any) -> None:
        """One block over the reserve is offered, the reserve itself is not."""
        for extra, offered in ((0, False), (1, True)):
            b = bench(usable_blocks=20, reserve_margin_blocks=2)
            b.add(prompt=10 * BLOCK)
            running = b.admit()
            # It now holds 10 full blocks; its next token but one opens no further one (V1).
            b.check(running.num_tokens, 10 * BLOCK + 1)
            b.withhold(10 - 2 - extra)
            b.add()
            b.check(bool(b.queue), offered)

    def _three_of_one_job(self, bench: Any) -> tuple[Any, list[Any]]:
        """A bench of 30 blocks, and the requests of 5 blocks each that run on it."""
        b = bench(usable_blocks=30, reserve_margin_blocks=0)
        running = [b.add("news", prompt=5 * BLOCK) for _ in range(3)]
        b.admit_all()
        return b, running

    def test_v4_a_prefix_that_runs_already_is_not_charged_again(self, bench: Any) -> None:
        """Of 5 blocks a request needs 2 of its own, as 3 are those of a request that runs."""
        b, running = self._three_of_one_job(bench)
        b.add("news", prompt=5 * BLOCK)
        b.withhold(30 - 3 * 5 - 3)
        b.check(b.offered(), None)
        for request, tokens in zip(running, (4 * BLOCK, 3 * BLOCK, 3 * BLOCK), strict=True):
            b.queue.found_in_cache(request.request_id, tokens)
        b.check(bool(b.queue), True)
        b.withhold(30 - 3 * 5 - 1)
        b.check(b.offered(), None)

    def test_v4_a_prefix_is_charged_until_three_have_found_it(self, bench: Any) -> None:
        b, running = self._three_of_one_job(bench)
        b.add("news", prompt=5 * BLOCK)
        b.withhold(30 - 3 * 5 - 3)
        for request, offered in zip(running, (False, False, True), strict=True):
            b.queue.found_in_cache(request.request_id, 3 * BLOCK)
            b.check(bool(b.queue), offered)
        b.queue.found_in_cache(running[0].request_id, 0)
        b.check(bool(b.queue), False)

    def test_v4_a_prefix_that_nobody_holds_is_charged(self, bench: Any) -> None:
        b, running = self._three_of_one_job(bench)
        other = b.add("chat")
        b.admit_all()
        for request in running:
            b.queue.found_in_cache(request.request_id, 3 * BLOCK)
            b.finish(request, 10)
        b.check(other in b.engine.running(), True)
        b.add("news", prompt=5 * BLOCK)
        b.withhold(30 - 1 - 3)
        b.check(b.offered(), None)

    def test_v4_after_a_refusal_the_prefix_is_charged(self, bench: Any) -> None:
        """What was wrongly taken for shared is not offered again before there is room for all of it."""
        b, running = self._three_of_one_job(bench)
        for request in running:
            b.queue.found_in_cache(request.request_id, 3 * BLOCK)
        refused = b.add("news", prompt=5 * BLOCK)
        b.withhold(30 - 3 * 5 - 3)
        b.check(b.offered(), refused)
        b.queue.refused(refused.request_id)
        b.check(b.offered(), None)

    def test_v5_what_would_raise_the_peak_above_the_pool_waits(self, bench: Any) -> None:
        """With 95 of 100 blocks, 1,520 tokens, to be had, and 256 tokens of look-ahead."""
        for prompt_blocks, offered in ((20, True), (24, False)):
            b = bench(usable_blocks=100, look_ahead=True)
            b.teach("long", 900, 900, 900)
            b.add("long", prompt=40 * BLOCK)
            b.admit()  # it holds 41 blocks, 656 tokens
            b.add("long", prompt=prompt_blocks * BLOCK)
            # 656 + 20 * 16 + 2 * 256 = 1488, and 656 + 24 * 16 + 2 * 256 = 1552
            b.check(bool(b.queue), offered)

    def test_v5_what_ends_before_the_peak_does_not_wait(self, bench: Any) -> None:
        b = bench(usable_blocks=100, look_ahead=True)
        b.teach("long", 900, 900, 900)
        b.teach("short", 3, 3, 3)
        b.add("long", prompt=40 * BLOCK)
        b.admit()
        b.add("long", prompt=24 * BLOCK)
        short = b.add("short", prompt=24 * BLOCK)
        b.check(b.offered(), short)

    def test_v5_an_unknown_job_is_taken_to_go_on(self, bench: Any) -> None:
        b = bench(usable_blocks=100, look_ahead=True)
        b.add("unknown", prompt=40 * BLOCK)
        b.admit()
        b.add("unknown", prompt=24 * BLOCK)
        b.check(b.offered(), None)

    def test_v5_an_idle_engine_looks_no_further(self, bench: Any) -> None:
        b = bench(usable_blocks=10, look_ahead=True)
        request = b.add("unknown", prompt=10 * BLOCK)
        b.check(b.offered(), request)

    # --- everything at once -------------------------------------------------------------------------

    def test_lockstep_with_the_specification(self, new_queue: QueueFactory, seeded: Any) -> None:
        """Q6 and all others: over random histories the specification makes the same choices."""
        self._search(lockstep(new_queue), seeded)

    def _search(self, machine: type[QueueLockstep], seeded: Any) -> None:
        of_profile = hypothesis.settings()
        search = hypothesis.settings(
            max_examples=lockstep_examples(),
            stateful_step_count=50,
            deadline=None,
            report_multiple_bugs=False,  # one rule at a time, and soon
            phases=[phase for phase in of_profile.phases if phase is not hypothesis.Phase.explain],
        )
        run_state_machine_as_test(seeded(machine), settings=search)


class BlendingQueueContract(QueueContract):
    """The same for a queue that also offers ``order: blend`` (O5b, O5c)."""

    def test_o5c_needs_are_taken_as_they_are_spread(self, bench: Any) -> None:
        # Of 10, 9, 8 and 7 waiting after 3, 4, 5 and 6 starts, at 0.85, 0.47, 0.09 and 0.71 of the list.
        b = bench(order="blend")
        b.teach("news", 9, 9, 9)
        of = {prompt: b.add("news", prompt=prompt) for prompt in range(10, 101, 10)}
        b.check([b.admit() for _ in range(4)], [of[90], of[50], of[10], of[70]])

    def test_o5c_each_eighth_is_the_shortest(self, bench: Any) -> None:
        b = bench(order="blend")
        b.teach("news", 9, 9, 9)
        waiting = [b.add("news", prompt=prompt) for prompt in range(10, 210, 10)]
        for started in range(3, 16):
            admitted = b.admit()
            if started in (7, 15):
                b.check(admitted, waiting[0])
            waiting.remove(admitted)

    def test_o5c_equal_needs_keep_their_order_of_arrival(self, bench: Any) -> None:
        b = bench(order="blend")
        b.teach("news", 9, 9, 9)
        requests = [b.add("news", prompt=prompt) for prompt in (20, 50, 50, 50, 20, 20)]
        b.check([b.admit() for _ in range(4)], [requests[place] for place in (1, 0, 4, 2)])

    def test_o5c_if_it_does_not_fit_the_longest_that_fits(self, bench: Any) -> None:
        b = bench(order="blend", usable_blocks=20, reserve_margin_blocks=0)
        b.teach("news", 9, 9, 9, 9)
        b.withhold(14)
        of = {blocks: b.add("news", prompt=blocks * BLOCK) for blocks in (2, 4, 7, 8, 9)}
        b.check(b.offered(), of[4])  # 7 is in turn

    def test_o5c_an_order_of_each_job_and_priority(self, bench: Any) -> None:
        b = bench(order="blend", priority_policy=True)
        b.teach("news", 9, 9, 9)
        b.add("chat")
        b.admit()
        b.add("news", prompt=900, priority=1)
        of = {prompt: b.add("news", prompt=prompt) for prompt in (10, 20, 30)}
        b.check(b.offered(), of[30])

    def test_o5b_lockstep_with_what_the_specification_allows(
        self, new_queue: QueueFactory, seeded: Any
    ) -> None:
        """O5b and all others: over random histories every choice is one that the specification allows."""
        self._search(lockstep(new_queue, BlendLockstep), seeded)


class EstimatorContract(Contract):
    """Rules E1, E2, E4 and E5 of an estimator. Override :meth:`make_estimator`.

    E3, which requests are observed, is the queue's concern and part of :class:`QueueContract`.
    """

    @pytest.fixture
    def make_estimator(self) -> EstimatorFactory:
        """The factory of the estimator under test."""
        what = "the weight of the newest observation that makes an estimator without observations"
        raise self._not_overridden("make_estimator", what)

    @pytest.fixture
    def estimator(self, make_estimator: Any, history: History) -> Callable[..., Any]:
        """Makes an estimator under test that has observed some lengths."""
        factory = checked(make_estimator, self._named("make_estimator"), Estimator)

        def make(alpha: float = 0.1, *decoded: int) -> Any:
            history.sum_up(0, f"a new estimator, alpha={alpha}")
            made = Recorded(factory(alpha), history)
            for tokens in decoded:
                made.observe(tokens)
            return made

        return make

    def test_e1_a_job_without_observations_is_predicted_128_tokens(
        self, estimator: Any, history: History
    ) -> None:
        history.check(estimator().predicted_tokens(), 128)

    def test_e2_the_first_observation_is_the_estimate(self, estimator: Any, history: History) -> None:
        history.check(estimator(0.1, 7).predicted_tokens(), 7)

    def test_e2_each_later_one_moves_it_by_its_weight(self, estimator: Any, history: History) -> None:
        history.check(estimator(0.5, 10, 110).predicted_tokens(), 60)
        history.check(estimator(0.25, 100, 20, 0).predicted_tokens(), 60)  # 100, 80, 60

    def test_e2_it_never_stops_learning(self, estimator: Any, history: History) -> None:
        # 2000 - 1990 * 0.9**200 is a little less than 2000.
        history.check(estimator(0.1, *[10] * 50, *[2000] * 200).predicted_tokens(), 1999)

    def test_e4_a_prediction_is_rounded_down(self, estimator: Any, history: History) -> None:
        history.check(estimator(0.5, 10, 13).predicted_tokens(), 11)

    def test_e4_a_prediction_is_within_the_limits_of_the_request(
        self, estimator: Any, history: History
    ) -> None:
        for min_tokens, max_tokens, expected in ((0, 16, 16), (200, 300, 200), (5, 4096, 128)):
            history.check(estimator().remaining_tokens(0, min_tokens, max_tokens), expected)
        history.check(estimator(0.1, 0).remaining_tokens(0, 0, 16), 1)

    def test_e5_what_runs_is_predicted_to_decode_at_least_one_more(
        self, estimator: Any, history: History
    ) -> None:
        for output_tokens, expected in ((28, 100), (127, 1), (128, 1), (500, 1)):
            history.check(estimator().remaining_tokens(output_tokens, 0, 4096), expected)

    def test_e2_any_lengths_are_averaged_as_the_rule_says(
        self, estimator: Any, history: History, seeded: Any
    ) -> None:
        """The rule in exact arithmetic; floating point may miss a whole number by a little."""
        alphas = st.integers(1, 10).map(lambda tenths: tenths / 10)

        @hypothesis.given(alphas, st.lists(st.integers(0, 100_000), min_size=1, max_size=20))
        def search(alpha: float, decoded: list[int]) -> None:
            exact, weight = Fraction(decoded[0]), Fraction(alpha)
            for tokens in decoded[1:]:
                exact = weight * tokens + (1 - weight) * exact
            allowed = sorted({floor(exact - Fraction(1, 10**6)), floor(exact + Fraction(1, 10**6))})
            predicted = estimator(alpha, *decoded).predicted_tokens()
            if predicted not in allowed:
                raise history.failure(str(predicted), " or ".join(map(str, allowed)))

        seeded(search)()


class ReservationContract(Contract):
    """Rules V1, V2, V3 and V5 of a reservation. Override :meth:`make_reservation`.

    V4, what fits, shows in what a queue offers and is part of :class:`QueueContract`.
    """

    @pytest.fixture
    def make_reservation(self) -> ReservationFactory:
        """The factory of the reservation under test."""
        what = "a FakeEngine and the Settings that makes a reservation"
        raise self._not_overridden("make_reservation", what)

    @pytest.fixture
    def reservation(self, make_reservation: Any, history: History) -> Callable[..., Any]:
        """Makes the reservation under test over an engine."""
        factory = checked(make_reservation, self._named("make_reservation"), Reservation)

        def make(engine: FakeEngine, **settings: Any) -> Any:
            options = ", ".join(f"{key}={value}" for key, value in settings.items())
            history.sum_up(0, f"a new reservation over {about(engine)}, {options or 'default settings'}")
            for r in engine.running():
                tokens = f"{r.num_tokens} tokens, {r.num_computed_tokens} of them computed"
                history.note(f"{r.request_id} runs with {tokens}")
            return Recorded(factory(engine, Settings(**settings)), history)

        return make

    def test_v1_a_request_takes_a_block_when_its_token_after_the_next_opens_one(
        self, reservation: Any, history: History
    ) -> None:
        for prompt, expected in ((2 * BLOCK - 2, 0), (2 * BLOCK - 1, 1), (2 * BLOCK, 0)):
            engine = FakeEngine(20, BLOCK)
            request = _start(engine, prompt)
            history.check(reservation(engine).next_step_blocks(request), expected)

    def test_v1_look_ahead_slots_are_counted(self, reservation: Any, history: History) -> None:
        engine = FakeEngine(20, BLOCK, lookahead_tokens=3)
        request = _start(engine, 2 * BLOCK - 4)
        history.check(reservation(engine).next_step_blocks(request), 1)

    def test_v1_a_chunked_prefill_takes_its_next_chunk(self, reservation: Any, history: History) -> None:
        engine = FakeEngine(20, BLOCK, step_tokens=2 * BLOCK)
        request = _start(engine, 6 * BLOCK)
        history.check(reservation(engine).next_step_blocks(request), 2)

    def test_v2_the_reserve_is_the_need_and_a_margin_up_to_a_limit(
        self, reservation: Any, history: History
    ) -> None:
        engine = FakeEngine(20, BLOCK)
        for _ in range(2):
            _start(engine, 2 * BLOCK - 1)  # each needs one more block
        for margin, limit, reserved in ((0, 8, 2), (3, 8, 5), (3, 4, 4), (0, 1, 1), (5, 0, 0)):
            r = reservation(engine, reserve_margin_blocks=margin, reserve_max_blocks=limit)
            history.check(r.budget_tokens(), (16 - reserved) * BLOCK)

    def test_v3_the_budget_is_never_negative(self, reservation: Any, history: History) -> None:
        engine = FakeEngine(20, BLOCK)
        engine.withhold(18)
        for margin, budget in ((1, BLOCK), (2, 0), (3, 0)):
            r = reservation(engine, reserve_margin_blocks=margin)
            history.check(r.budget_tokens(), budget)

    def test_v3_the_budget_follows_the_pool(self, reservation: Any, history: History) -> None:
        engine = FakeEngine(20, BLOCK)
        r = reservation(engine, reserve_margin_blocks=2)
        history.check(r.budget_tokens(), 18 * BLOCK)
        engine.withhold(10)
        history.note("10 blocks are withheld")
        history.check(r.budget_tokens(), 8 * BLOCK)

    def test_v5_the_peak_is_held_just_before_a_request_ends(self, reservation: Any, history: History) -> None:
        for running, candidate, peak in (
            ([], (50, 4), 54),
            ([(100, 10)], (50, 4), 158),  # 150 held, and both decode 4 more
            ([(100, 10)], (5, 4), 113),
            ([(100, 10)], (1, 1), 103),  # what is after the candidate's end does not count
            ([(100, 10)], (50, 30), 170),  # the other ends first: 150 held, and both decode 10 more
        ):
            r = reservation(FakeEngine(20, BLOCK))
            history.check(r.predicted_peak_tokens(running, candidate), peak)

    def test_v1_the_engine_allocates_what_was_foretold(
        self, reservation: Any, history: History, seeded: Any
    ) -> None:
        """An independent source: the ledger of an engine that goes on for two steps."""
        sizes = {"block_size": st.integers(1, 32), "step_tokens": st.integers(1, 100)}
        engines = st.builds(FakeEngine, st.just(2000), lookahead_tokens=st.integers(0, 9), **sizes)

        @hypothesis.given(engines, st.integers(1, 300), st.integers(0, 5))
        def search(engine: FakeEngine, prompt: int, steps: int) -> None:
            request = _start(engine, prompt)
            for _ in range(steps):
                engine.step(request)
            foretold = reservation(engine).next_step_blocks(request)
            engine.step(request)
            free_blocks = engine.free_blocks()
            engine.step(request)
            history.check(foretold, free_blocks - engine.free_blocks())

        seeded(search)()

    def test_v5_the_peak_is_the_most_that_a_decode_step_by_step_holds(
        self, reservation: Any, history: History, seeded: Any
    ) -> None:
        """An independent source: let all decode a token a step, and see what they hold together."""
        members = st.tuples(st.integers(0, 500), st.integers(1, 50))

        @hypothesis.given(st.lists(members, max_size=8), members)
        def search(running: list[HeldAndRemaining], candidate: HeldAndRemaining) -> None:
            r = reservation(FakeEngine(20, BLOCK))
            predicted = r.predicted_peak_tokens(running, candidate)
            history.check(predicted, _most_held([*running, candidate], until=candidate[1]))

        seeded(search)()


def _names(requests: Any) -> list[str]:
    return sorted(request.request_id for request in requests)


def _start(engine: FakeEngine, prompt: int) -> FakeRequest:
    request = FakeRequest(f"r{len(engine.running())}", prompt, max_tokens=4096)
    assert engine.start(request), "the contract's engines have room for what it starts"
    return request


def _most_held(members: list[HeldAndRemaining], until: int) -> int:
    most = 0
    for step in range(1, 1 + until):
        present = [held for held, remaining in members if remaining >= step]
        most = max(most, sum(present) + step * len(present))
    return most

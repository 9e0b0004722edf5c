"""The contract of a waiting queue, as one class to subclass.

.. code-block:: python

    class TestMyQueue(QueueContract):
        @pytest.fixture
        def make_queue(self):
            return lambda engine, settings, priority_policy: MyQueue(engine, settings)

Each test is named by the rule that it checks; the last one runs the queue in lockstep with the
specification over random histories.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import run_state_machine_as_test

from batchjob_spec.queue import Settings
from batchjob_testkit.fakes import FakeEngine, FakeRequest, FakeSamplingParams
from batchjob_testkit.queues import WaitingQueue
from batchjob_testkit.stateful import QueueFactory, lockstep

BLOCK = 16

LOCKSTEP_EXAMPLES = int(os.environ.get("BATCHJOB_LOCKSTEP_EXAMPLES", "150"))
"""How many random histories the lockstep test runs; the environment variable sets it."""


class Bench:
    """A queue under test beside a fake engine, with the few moves that the contract makes."""

    def __init__(
        self,
        make_queue: QueueFactory,
        *,
        usable_blocks: int = 1000,
        priority_policy: bool = False,
        **settings: Any,
    ) -> None:
        self.engine = FakeEngine(usable_blocks, BLOCK)
        # The examples of the other rules are easier to follow without the look-ahead.
        with_defaults = Settings(**{"look_ahead": False, **settings})
        self.queue: WaitingQueue = make_queue(self.engine, with_defaults, priority_policy)
        self._names = 0

    def add(
        self,
        job: str | None = None,
        *,
        prompt: int = BLOCK,
        max_tokens: int = 4096,
        **fields: Any,
    ) -> FakeRequest:
        """A request arrives."""
        name = f"r{self._names}" + (f"#job_name[{job}]#" if job is not None else "")
        self._names += 1
        request = FakeRequest(name, prompt, max_tokens, **fields)
        self.queue.add_request(request)
        return request

    def admit(self) -> FakeRequest:
        """The engine runs the request that is offered."""
        peeked = self.queue.peek_request()
        request: FakeRequest = self.queue.pop_request()
        assert id(peeked) == id(request), f"popped {request}, peeked at {peeked}"
        assert self.engine.start(request), f"{request} is offered and finds no room"
        return request

    def preempt(self, request: FakeRequest) -> None:
        """The engine throws a request out."""
        self.engine.preempt(request)
        self.queue.prepend_request(request)

    def finish(self, request: FakeRequest, decoded: int, *, by_itself: bool = True) -> None:
        """A running request is over after ``decoded`` tokens."""
        request.num_output_tokens = decoded
        self.engine.finish(request)
        self.queue.end(request.request_id, by_itself=by_itself)

    def teach(self, job: str, *decoded: int) -> None:
        """Requests of a job come, run and end by themselves after ``decoded`` tokens."""
        for tokens in decoded:
            request = self.add(job)
            while self.admit() is not request:
                pass
            self.finish(request, tokens)

    def offered(self) -> FakeRequest | None:
        """The request that the queue offers, if any."""
        if not self.queue:
            return None
        request: FakeRequest = self.queue.peek_request()
        return request

    def admit_all(self) -> list[FakeRequest]:
        """Admit as long as something is offered."""
        admitted = []
        while self.queue:
            admitted.append(self.admit())
        return admitted


class QueueContract:
    """Rules J, E, V, O, Q and P of a waiting queue. Override :meth:`make_queue`."""

    @pytest.fixture
    def make_queue(self) -> QueueFactory:
        """The factory of the queue under test."""
        raise NotImplementedError(
            f"{type(self).__name__} must override the fixture 'make_queue': a function of a "
            "FakeEngine, the Settings and a bool (policy=priority) that returns an empty queue"
        )

    @pytest.fixture
    def bench(self, make_queue: QueueFactory) -> Callable[..., Bench]:
        """Makes a bench with the queue under test."""
        return lambda **options: Bench(make_queue, **options)

    # --- Q: the queue -----------------------------------------------------------------------------

    def test_q1_every_request_is_in_the_queue_exactly_once(self, bench: Any) -> None:
        b = bench()
        requests = [b.add("news"), b.add("chat"), b.add()]
        b.queue.add_request(requests[0])
        assert len(b.queue) == len(list(b.queue)) == 3
        assert {id(r) for r in b.queue} == {id(r) for r in requests}

    def test_q1_what_comes_back_is_in_the_queue_again(self, bench: Any) -> None:
        b = bench()
        requests = [b.add("news") for _ in range(3)]
        taken = [b.queue.pop_request() for _ in range(2)]
        b.queue.prepend_requests(iter(taken))
        assert sorted(r.request_id for r in b.queue) == [r.request_id for r in requests]

    def test_q2_pop_takes_what_peek_showed(self, bench: Any) -> None:
        b = bench(usable_blocks=10)
        for _ in range(3):
            b.teach("news", 10)
        b.add("news", prompt=2 * BLOCK)
        peeked = b.queue.peek_request()
        b.add("news", prompt=4 * BLOCK)  # would come before the other
        assert b.queue.pop_request() is peeked

    def test_q2_a_request_aborted_after_the_peek_is_never_offered(self, bench: Any) -> None:
        b = bench()
        b.add("news")
        other = b.add("news")
        aborted = b.queue.peek_request()
        survivor = other if aborted is not other else next(r for r in b.queue if r is not other)
        b.queue.remove_requests([aborted])
        assert b.queue.pop_request() is survivor

    def test_q2_peek_sees_that_the_pool_has_shrunk(self, bench: Any) -> None:
        b = bench(usable_blocks=20, reserve_margin_blocks=0)
        running = b.add()
        b.admit()
        b.add(prompt=10 * BLOCK)
        small = b.add()
        assert b.offered() is not small
        b.engine.withhold(15)
        assert b.offered() is small
        assert running in b.engine.running()

    def test_q3_removing_what_is_not_there_changes_nothing(self, bench: Any) -> None:
        b = bench()
        request = b.add()
        b.queue.remove_request(FakeRequest("stranger", 5, 5))
        b.queue.remove_requests([FakeRequest("stranger", 5, 5)])
        assert list(b.queue) == [request]
        b.queue.remove_request(request)
        b.queue.remove_request(request)
        assert len(b.queue) == 0

    def test_q4_len_counts_all_and_bool_says_whether_one_is_admissible(self, bench: Any) -> None:
        b = bench(usable_blocks=8, reserve_margin_blocks=0)
        assert len(b.queue) == 0
        assert not b.queue
        b.add(prompt=7 * BLOCK)
        b.admit()
        b.add(prompt=7 * BLOCK)
        assert len(b.queue) == 1
        assert not b.queue
        with pytest.raises(IndexError):
            b.queue.peek_request()

    def test_q5_the_same_events_lead_to_the_same_choices(self, bench: Any) -> None:
        def history() -> list[str]:
            b = bench()
            b.teach("news", 500, 400, 600)
            for job in ("news", "chat", "labels") * 4:
                b.add(job)
            return [request.request_id for request in b.admit_all()]

        assert history() == history()

    # --- O: the order -----------------------------------------------------------------------------

    def test_o0_priority_comes_first_under_its_policy_only(self, bench: Any) -> None:
        for policy, expected in ((True, 1), (False, 0)):
            b = bench(priority_policy=policy)
            requests = [b.add("news", priority=1), b.add("news", priority=-1)]
            assert b.offered() is requests[expected]

    def test_o1_the_preempted_come_first_in_the_order_of_their_preemption(self, bench: Any) -> None:
        b = bench()
        first, second, other = (b.add(prompt=n * BLOCK) for n in (1, 5, 9))
        b.admit_all()
        b.preempt(second)
        b.preempt(first)
        b.finish(other, 1)  # so that nothing is held back
        b.add(prompt=20 * BLOCK)
        assert b.admit() is second
        assert b.admit() is first

    def test_o2_the_first_three_requests_of_an_unknown_job_come_first(self, bench: Any) -> None:
        b = bench()
        b.teach("news", 900, 900, 900)
        b.add("news", prompt=9 * BLOCK)
        unknown = [b.add("chat", prompt=n) for n in (1, 2, 3, 400)]
        assert [b.admit() for _ in range(3)] == unknown[:3]
        assert b.offered() is not unknown[3]

    def test_o2_a_drained_job_does_not_probe_again(self, bench: Any) -> None:
        b = bench()
        b.teach("news", 900, 900, 900)
        b.teach("labels", 1, 1, 1)
        late = b.add("labels")
        long = b.add("news")
        assert [b.admit(), b.admit()] == [long, late]

    def test_o2_a_probe_that_does_not_fit_is_passed_over(self, bench: Any) -> None:
        b = bench(usable_blocks=12, reserve_margin_blocks=0)
        b.add("news")
        b.admit()
        b.add("chat", prompt=12 * BLOCK)
        fitting = b.add("chat", prompt=BLOCK)
        assert b.offered() is fitting

    def test_o4_long_jobs_first_while_much_is_free_else_short_ones(self, bench: Any) -> None:
        b = bench(usable_blocks=1000, low_available_tokens_threshold=100 * BLOCK)
        b.teach("short", 3, 3, 3)
        b.teach("long", 500, 500, 500)
        short, long = b.add("short"), b.add("long")
        assert b.offered() is long
        b.engine.withhold(1000 - 101)  # the margin is 2, so 99 blocks are left
        running = b.add("chat")
        assert b.admit() is running
        assert b.offered() is short

    def test_o4_the_threshold_itself_is_little(self, bench: Any) -> None:
        for threshold_blocks, expected in ((9, "long"), (10, "short")):
            b = bench(
                usable_blocks=12,
                reserve_margin_blocks=2,
                low_available_tokens_threshold=threshold_blocks * BLOCK,
            )
            b.teach("short", 3, 3, 3)
            b.teach("long", 500, 500, 500)
            b.add("short")
            b.add("long")
            assert expected in b.offered().request_id

    def test_o4_of_two_long_jobs_the_longer_one_then_the_older_one(self, bench: Any) -> None:
        b = bench()
        b.teach("first", 300, 300, 300)
        b.teach("second", 300, 300, 300)
        b.teach("longest", 700, 700, 700)
        of = {job: b.add(job) for job in ("second", "longest", "first")}
        assert [b.admit() for _ in range(3)] == [of["longest"], of["first"], of["second"]]

    def test_o5_the_longest_need_first_and_equal_needs_in_order(self, bench: Any) -> None:
        b = bench()
        b.teach("news", 9, 9, 9)
        requests = [b.add("news", prompt=prompt) for prompt in (20, 50, 20, 50, 70)]
        expected = [requests[position] for position in (4, 1, 3, 0, 2)]
        assert [b.admit() for _ in range(5)] == expected

    def test_o6_nothing_that_fits_waits_behind_what_does_not(self, bench: Any) -> None:
        b = bench(usable_blocks=20, reserve_margin_blocks=0)
        b.teach("news", 900, 900, 900)
        b.teach("chat", 500, 500, 500)
        b.add("code", prompt=10 * BLOCK)
        b.admit()
        b.add("news", prompt=15 * BLOCK)
        b.add("chat", prompt=15 * BLOCK)
        small = b.add("chat", prompt=3 * BLOCK)
        assert b.offered() is small

    # --- P: progress ------------------------------------------------------------------------------

    def test_p1_an_idle_engine_does_not_wait_for_a_margin(self, bench: Any) -> None:
        b = bench(usable_blocks=4, reserve_margin_blocks=64, reserve_max_blocks=64)
        request = b.add(prompt=4 * BLOCK)
        assert b.offered() is request

    def test_p2_what_can_never_fit_is_named_and_the_rest_go_on(self, bench: Any) -> None:
        b = bench(usable_blocks=4)
        giant = b.add(prompt=4 * BLOCK + 1)
        small = b.add()
        assert b.queue.unservable() == [giant]
        assert len(b.queue) == 2
        assert b.admit() is small
        assert not b.queue
        b.queue.remove_request(giant)
        b.queue.end(giant.request_id, by_itself=False)
        assert b.queue.unservable() == []

    def test_p2_what_outgrew_the_pool_is_named_when_it_comes_back(self, bench: Any) -> None:
        b = bench(usable_blocks=4)
        request = b.add(prompt=3 * BLOCK)
        b.admit()
        request.num_output_tokens = BLOCK + 1
        b.preempt(request)
        assert b.queue.unservable() == [request]
        assert not b.queue

    def test_p4_no_loop_of_preemption_and_admission(self, bench: Any) -> None:
        b = bench(usable_blocks=10, reserve_margin_blocks=0)
        running, victim = b.add(prompt=5 * BLOCK), b.add(prompt=5 * BLOCK)
        assert b.admit_all() == [running, victim]
        b.preempt(victim)
        victim.num_output_tokens = 0
        assert not b.queue, "it was just preempted, and both are predicted to decode 128 tokens"
        b.finish(running, 1)
        assert b.offered() is victim

    # --- J and E: jobs and what is learnt of them ---------------------------------------------------

    def test_j2_extra_arguments_name_the_job(self, bench: Any) -> None:
        b = bench()
        b.teach("labels", 1, 1, 1)
        b.teach("news", 900, 900, 900)
        tagged = b.add("labels")
        named = b.add("labels", sampling_params=FakeSamplingParams(extra_args={"job_name": "news"}))
        assert [b.admit(), b.admit()] == [named, tagged]

    @pytest.mark.parametrize("max_jobs", [0, 1, 2])
    def test_j4_no_number_of_jobs_is_an_error(self, bench: Any, max_jobs: int) -> None:
        b = bench(max_jobs=max_jobs)
        requests = [b.add(f"job {number}") for number in range(30)]
        assert sorted(map(id, b.admit_all())) == sorted(map(id, requests))
        for request in requests:
            b.finish(request, 5)
        for number in range(30):  # and one after the other
            b.teach(f"late job {number}", 5, 5)
        assert len(b.queue) == 0

    def test_j4_a_displaced_job_gets_its_place_when_one_is_free(self, bench: Any) -> None:
        b = bench(max_jobs=1)
        b.teach("first", 900)
        held = b.add("first")
        displaced = [b.add("second", prompt=n) for n in (1, 2, 3, 4, 5)]
        b.add("__default__")
        b.queue.remove_request(held)
        b.queue.end(held.request_id, by_itself=False)
        # "second" has a place now, and its first requests are probes in their order of arrival.
        assert b.offered() is displaced[0]

    def test_j4_the_job_least_recently_used_gives_up_its_place(self, bench: Any) -> None:
        b = bench(max_jobs=2)
        b.teach("kept", 900, 900, 900)
        b.teach("given up", 500, 500, 500)
        b.teach("kept", 900)
        b.teach("new", 2000, 2000, 2000)
        kept, new = b.add("kept"), b.add("new")
        # Were "kept" forgotten, its request would be a probe and come first.
        assert [b.admit(), b.admit()] == [new, kept]

    def test_j4_what_runs_of_a_displaced_job_counts_as_started(self, bench: Any) -> None:
        b = bench(max_jobs=1)
        b.teach("__default__", 900, 900, 900)
        b.teach("first", 10)
        held = b.add("first")
        b.admit()
        small = [b.add("second", prompt=BLOCK) for _ in range(3)]
        large = [b.add("second", prompt=5 * BLOCK) for _ in range(3)]
        assert [b.admit() for _ in range(3)] == large, "under the default job the longest come first"
        b.finish(held, 10)
        unnamed = b.add("__default__")
        assert b.offered() is unnamed, f"{small} are no probes, three of their job have started"

    def test_e2_an_estimate_never_freezes(self, bench: Any) -> None:
        b = bench()
        b.teach("changed", *[10] * 10, *[2000] * 50)
        b.teach("middle", *[1000] * 3)
        b.add("middle")
        changed = b.add("changed")
        assert b.offered() is changed

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
        assert b.offered() is aborted

    def test_e4_a_prediction_is_rounded_down(self, bench: Any) -> None:
        b = bench(usable_blocks=20, short_decode_token_threshold=32)
        b.teach("shorter", 31, 31, 31)
        b.teach("just short", 32, 32, 41)  # 0.9 * 32 + 0.1 * 41 = 32.9
        b.add("shorter")
        short = b.add("just short")
        assert b.offered() is short, "both are short, and of these the longer comes first"

    # --- V: the reservation -------------------------------------------------------------------------

    def test_v2_the_reserve_keeps_what_runs_supplied(self, bench: Any) -> None:
        """One block over the reserve is offered, the reserve itself is not."""
        for extra, offered in ((0, False), (1, True)):
            b = bench(usable_blocks=20, reserve_margin_blocks=2)
            b.add(prompt=10 * BLOCK)
            running = b.admit()
            # It now holds 10 full blocks; its next token but one opens no further one (V1).
            assert running.num_tokens == 10 * BLOCK + 1
            b.engine.withhold(10 - 2 - extra)
            b.add()
            assert bool(b.queue) is offered

    def test_v5_what_would_raise_the_peak_above_the_pool_waits(self, bench: Any) -> None:
        """With 95 of 100 blocks, 1,520 tokens, to be had, and 256 tokens of look-ahead."""
        for prompt_blocks, offered in ((20, True), (24, False)):
            b = bench(usable_blocks=100, look_ahead=True)
            b.teach("long", 900, 900, 900)
            b.add("long", prompt=40 * BLOCK)
            b.admit()  # it holds 41 blocks, 656 tokens
            b.add("long", prompt=prompt_blocks * BLOCK)
            # 656 + 20 * 16 + 2 * 256 = 1488, and 656 + 24 * 16 + 2 * 256 = 1552
            assert bool(b.queue) is offered

    def test_v5_what_ends_before_the_peak_does_not_wait(self, bench: Any) -> None:
        b = bench(usable_blocks=100, look_ahead=True)
        b.teach("long", 900, 900, 900)
        b.teach("short", 3, 3, 3)
        b.add("long", prompt=40 * BLOCK)
        b.admit()
        b.add("long", prompt=24 * BLOCK)
        short = b.add("short", prompt=24 * BLOCK)
        assert b.offered() is short

    def test_v5_an_unknown_job_is_taken_to_go_on(self, bench: Any) -> None:
        b = bench(usable_blocks=100, look_ahead=True)
        b.add("unknown", prompt=40 * BLOCK)
        b.admit()
        b.add("unknown", prompt=24 * BLOCK)
        assert not b.queue

    def test_v5_an_idle_engine_looks_no_further(self, bench: Any) -> None:
        b = bench(usable_blocks=10, look_ahead=True)
        request = b.add("unknown", prompt=10 * BLOCK)
        assert b.offered() is request

    # --- everything at once -------------------------------------------------------------------------

    def test_lockstep_with_the_specification(self, make_queue: QueueFactory) -> None:
        """Q6 and all others: over random histories the specification makes the same choices."""
        run_state_machine_as_test(
            lockstep(make_queue),
            settings=hypothesis_settings(
                max_examples=LOCKSTEP_EXAMPLES, stateful_step_count=50, deadline=None
            ),
        )

"""The contract of a whole scheduler, as one class to subclass.

.. code-block:: python

    class TestMyScheduler(SchedulerContract):
        @pytest.fixture
        def make_engine(self):
            return lambda limits: FakeEngineCore(MyQueue, limits)  # or an engine of your own

What is read is the engine's block pool, its running list and its answers, after every step. A failure
names the rule and prints what happened on the engine up to there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings

from batchjob_spec.blocks import blocks_for
from batchjob_testkit.batches import Abort, Batch, Submit, play
from batchjob_testkit.contracts import Contract
from batchjob_testkit.engines import MAX_IDLE_STEPS, EngineCore, EngineLimits, Outcome, sampled_token
from batchjob_testkit.factories import checked
from batchjob_testkit.strategies import batches

BLOCK = 16

EngineFactory = Callable[[EngineLimits], EngineCore]
"""Makes an idle engine within these limits."""


class EngineBench:
    """An engine under test, with what must hold after each of its steps."""

    def __init__(self, engine: EngineCore, limits: EngineLimits) -> None:
        self.engine = engine
        self.limits = limits
        self.submitted: dict[str, Submit] = {}
        self.scheduled: Counter[str] = Counter()
        """The tokens that were ever scheduled for a request."""
        self.history: list[str] = []
        self._aborted: set[str] = set()
        self._idle_steps = 0

    # --- what happens -------------------------------------------------------------------------------

    def submit(
        self,
        request_id: str,
        prompt_tokens: int,
        decode_tokens: int,
        *,
        max_tokens: int | None = None,
        priority: int = 0,
    ) -> str:
        """A request arrives; returns its ID."""
        max_tokens = max_tokens or decode_tokens
        request = Submit(request_id, prompt_tokens, decode_tokens, max_tokens, priority)
        self.history.append(str(request))
        self.submitted[request_id] = request
        self.engine.submit(request_id, prompt_tokens, decode_tokens, max_tokens=max_tokens, priority=priority)
        return request_id

    def submit_alike(self, count: int, prompt_tokens: int, decode_tokens: int) -> list[str]:
        """Requests of one job arrive; returns their IDs."""
        names = [f"{number:03}#job_name[alike]#" for number in range(count)]
        return [self.submit(name, prompt_tokens, decode_tokens) for name in names]

    def abort(self, request_id: str) -> None:
        """The client of a request goes away, whatever has become of the request."""
        self.history.append(str(Abort(request_id)))
        if request_id in self.unanswered:
            self._aborted.add(request_id)
        self.engine.abort(request_id)

    def step(self) -> dict[str, int]:
        """One step, after which everything that this contract says of a step is looked at."""
        live = self.unanswered
        answered = len(self.engine.answers)
        scheduled = self.engine.step()
        self.history.append(f"step {scheduled}, {self.engine.num_free_blocks} blocks free")
        self.scheduled.update(scheduled)
        self._look_at_the_limits(scheduled)
        self._require("P3", scheduled.keys() <= live, "what is scheduled is unfinished", scheduled, live)
        self._look_at_the_blocks()
        moved = scheduled or len(self.engine.answers) > answered or not self.unanswered
        self._idle_steps = 0 if moved else self._idle_steps + 1
        self._require("P1", self._idle_steps < MAX_IDLE_STEPS, "it goes on", "nothing scheduled", "progress")
        return scheduled

    def finish(self) -> dict[str, Outcome]:
        """Step until every request is answered, and look at each answer; returns the outcomes."""
        steps = 0
        while self.unanswered:
            self.step()
            steps += 1
            self._require("P1", steps < self._most_steps, "it comes to an end", steps, self._most_steps)
        self.step()  # what is still in flight comes in
        self._require("P3", not self.engine.running_ids, "nothing runs on", self.engine.running_ids, [])
        self._look_at_the_answers()
        return dict(self.engine.answers)

    def step_until(self, reached: Callable[[], Any]) -> None:
        """Step until something is so, or nothing is left to wait for."""
        while self.unanswered and not reached():
            self.step()

    # --- what is seen -------------------------------------------------------------------------------

    @property
    def unanswered(self) -> set[str]:
        """The requests that have no answer yet."""
        return self.submitted.keys() - {name for name, _ in self.engine.answers}

    @property
    def preempted(self) -> list[str]:
        """The requests that ran, do not run, and have no answer."""
        return sorted((self.unanswered & self.scheduled.keys()) - set(self.engine.running_ids))

    # --- what must hold -----------------------------------------------------------------------------

    @property
    def _most_steps(self) -> int:
        """More than any order needs in which something advances at each step."""
        tokens = sum(request.prompt_tokens + request.output_tokens for request in self.submitted.values())
        return 100 + tokens * (1 + len(self.submitted))

    def _look_at_the_limits(self, scheduled: dict[str, int]) -> None:
        limits, running = self.limits, self.engine.running_ids
        tokens = sum(scheduled.values())
        budget = limits.max_num_batched_tokens
        self._require("limits", min(scheduled.values(), default=1) > 0, "one token or more", scheduled, 1)
        self._require("limits", tokens <= budget, "max_num_batched_tokens", tokens, budget)
        most = limits.max_num_seqs
        self._require("limits", len(scheduled) <= most, "max_num_seqs scheduled", len(scheduled), most)
        self._require("limits", len(running) <= most, "max_num_seqs running", len(running), most)

    def _look_at_the_blocks(self) -> None:
        free, usable = self.engine.num_free_blocks, self.limits.usable_blocks
        self._require("blocks", 0 <= free <= usable, "between none and all are free", free, usable)
        if not self.engine.running_ids:
            self._require("blocks", free == usable, "all are free while nothing runs", free, usable)

    def _look_at_the_answers(self) -> None:
        names = [name for name, _ in self.engine.answers]
        self._require(
            "P3", sorted(names) == sorted(self.submitted), "one answer each", names, sorted(self.submitted)
        )
        for name, outcome in self.engine.answers:
            request = self.submitted[name]
            tokens = tuple(
                sampled_token(position, request.decode_tokens)
                for position in range(1, request.output_tokens + 1)
            )
            reason = self._reason_of(request, outcome)
            self._require("P3", outcome.finish_reason == reason, f"how {name} ends", outcome, reason)
            if reason in ("abort", "error"):
                tokens = tokens[: len(outcome.tokens)]
            self._require("P3", outcome.tokens == tokens, f"the tokens of {name}", outcome.tokens, tokens)

    def _reason_of(self, request: Submit, outcome: Outcome) -> str:
        if request.request_id in self._aborted:
            return "abort"
        known = request.prompt_tokens + len(outcome.tokens)
        if blocks_for(known, self.limits.block_size) > self.limits.usable_blocks:
            # Its last token needs no room of its own, so it may still have ended by itself.
            ended = len(outcome.tokens) == request.output_tokens
            return request.finish_reason if ended else "error"
        return request.finish_reason

    def _require(self, rule: str, holds: bool, what: str, observed: object, expected: object) -> None:
        if not holds:
            history = "\n  ".join(self.history)
            raise AssertionError(
                f"{rule}: {what}: observed {observed}, expected {expected}\n"
                f"  {self.limits}\n  {history}\n"
                f"  running {list(self.engine.running_ids)}, unanswered {sorted(self.unanswered)}, "
                f"{self.engine.num_free_blocks} blocks free"
            )


class SchedulerContract(Contract):
    """Rules P1, P2 and P3 of a whole engine, and the limits that it runs in.

    Override :meth:`make_engine`. A scheduler that lets what can never fit wait for ever, as vLLM's own
    does, sets ``claims_p2 = False``. ``random_batches`` is how many are tried, unless it is to be as many
    as the Hypothesis profile says.
    """

    claims_p2: ClassVar[bool] = True
    random_batches: ClassVar[int | None] = None

    @pytest.fixture
    def make_engine(self) -> EngineFactory:
        """The factory of the engine under test."""
        raise self._not_overridden("make_engine", "the EngineLimits that makes an idle engine")

    @pytest.fixture
    def bench(self, make_engine: Any) -> Callable[..., EngineBench]:
        """Makes a bench with the engine under test from the limits that matter."""
        new_engine = checked(make_engine, self._named("make_engine"), EngineCore)

        def make_bench(**given_limits: Any) -> EngineBench:
            limits = EngineLimits(**given_limits)
            return EngineBench(new_engine(limits), limits)

        return make_bench

    # --- P1: progress -------------------------------------------------------------------------------

    def test_p1_an_idle_engine_runs_what_fills_the_whole_pool(self, bench: Any) -> None:
        b = bench(num_blocks=5)
        name = b.submit("#job_name[all]#", 4 * BLOCK - 1, 1)
        assert name in b.step(), f"P1: an idle engine of 4 blocks does not run {b.submitted[name]}"
        b.finish()

    def test_p1_an_engine_that_was_idle_runs_again(self, bench: Any) -> None:
        b = bench()
        for number in range(3):
            b.submit(f"{number}", BLOCK, 5)
            b.finish()

    @pytest.mark.parametrize("policy", ["fcfs", "priority"])
    def test_p1_a_starved_pool_comes_to_an_end(self, bench: Any, policy: str) -> None:
        b = bench(num_blocks=13, policy=policy)
        for number in range(20):
            b.submit(f"{number:03}", 1 + number * 37 % 90, 1 + number * 23 % 100, priority=number % 3)
        b.finish()

    # --- P2: what can never fit ---------------------------------------------------------------------

    def test_p2_what_can_never_fit_fails_with_a_reason_and_the_rest_go_on(self, bench: Any) -> None:
        self._skip_without_p2()
        b = bench(num_blocks=5)
        giants = [b.submit(f"giant {number}", 4 * BLOCK + 1, 5) for number in range(2)]
        small = b.submit_alike(3, BLOCK, 5)
        outcomes = b.finish()
        assert [outcomes[name].finish_reason for name in (*giants, *small)] == ["error"] * 2 + ["stop"] * 3
        for name in giants:
            reason = outcomes[name].stop_reason
            assert isinstance(reason, str), f"P2: {name} fails with {reason!r}, not with a reason in words"

    def test_p2_what_outgrows_the_pool_fails_and_the_rest_go_on(self, bench: Any) -> None:
        self._skip_without_p2()
        b = bench(num_blocks=6)
        growing = b.submit("growing", 4 * BLOCK, 100)
        small = b.submit("small", BLOCK, 5)
        outcomes = b.finish()
        assert (outcomes[growing].finish_reason, outcomes[small].finish_reason) == ("error", "stop")

    # --- P3: every request ends once ----------------------------------------------------------------

    def test_p3_every_request_ends_once_with_its_tokens_and_its_reason(self, bench: Any) -> None:
        b = bench()
        for number in range(40):
            decode = 1 + number * 7 % 30
            b.submit(f"{number:03}", 1 + number * 37 % 90, decode, max_tokens=decode if number % 3 else 9)
        b.finish()

    def test_p3_a_resumed_request_loses_no_token(self, bench: Any) -> None:
        b = bench(num_blocks=25)
        b.submit_alike(12, 2 * BLOCK, 100)
        b.finish()

    def test_p3_an_abort_while_waiting_loses_nothing_else(self, bench: Any) -> None:
        b = bench(max_num_seqs=1)
        names = b.submit_alike(4, BLOCK, 10)
        b.step()
        (running,) = b.engine.running_ids
        waiting = next(name for name in names if name != running)
        b.abort(waiting)
        assert b.finish()[waiting].tokens == ()

    def test_p3_an_abort_while_running_loses_nothing_else(self, bench: Any) -> None:
        b = bench()
        names = b.submit_alike(4, BLOCK, 10)
        b.step()
        b.step()
        b.abort(names[1])
        b.finish()

    def test_p3_an_abort_while_a_prompt_is_computed_loses_nothing_else(self, bench: Any) -> None:
        b = bench(max_num_batched_tokens=16)
        names = b.submit_alike(4, 5 * BLOCK, 10)
        b.step()
        (computing,) = b.engine.running_ids
        b.abort(computing)
        assert sorted(names) == sorted(b.finish())

    def test_p3_an_abort_while_preempted_loses_nothing_else(self, bench: Any) -> None:
        """A scheduler that never preempts has nothing to lose here."""
        b = bench(num_blocks=17)
        b.submit_alike(8, 2 * BLOCK, 100)
        b.step_until(lambda: b.preempted)
        for name in b.preempted:
            b.abort(name)
        b.finish()

    def test_p3_an_abort_of_what_is_unknown_or_over_changes_nothing(self, bench: Any) -> None:
        b = bench()
        (name,) = b.submit_alike(1, BLOCK, 5)
        b.abort("unknown")
        b.finish()
        b.abort(name)
        b.finish()

    def test_p3_all_are_aborted_at_once(self, bench: Any) -> None:
        b = bench(num_blocks=17, max_num_seqs=4)
        names = b.submit_alike(12, 2 * BLOCK, 100)
        b.step()
        b.step()
        for name in names:
            b.abort(name)
        b.finish()

    # --- limits -------------------------------------------------------------------------------------

    def test_limits_a_tiny_token_budget_is_kept(self, bench: Any) -> None:
        b = bench(max_num_batched_tokens=8, max_num_seqs=8)
        for number in range(12):
            b.submit(f"{number:03}", 1 + number * 37 % 90, 10)
        b.finish()

    def test_limits_no_more_run_than_allowed(self, bench: Any) -> None:
        b = bench(max_num_seqs=3)
        b.submit_alike(10, BLOCK, 10)
        b.step()
        assert len(b.engine.running_ids) == 3, "limits: as many run as may"
        b.finish()

    def test_limits_without_chunked_prefill_a_prompt_is_computed_in_one_step(self, bench: Any) -> None:
        b = bench(enable_chunked_prefill=False, max_num_batched_tokens=128, max_model_len=128)
        for number in range(10):
            b.submit(f"{number:03}", 60 + 5 * number, 5)
        while b.unanswered:
            before = dict(b.scheduled)
            for name, tokens in b.step().items():
                prompt = b.submitted[name].prompt_tokens
                assert name in before or tokens == prompt, (
                    f"limits: {tokens} tokens of a prompt of {prompt} are computed"
                )
        b.finish()

    def test_o0_the_more_urgent_request_runs_first_under_its_policy(self, bench: Any) -> None:
        b = bench(policy="priority", max_num_seqs=1)
        for priority in (3, 1, 2, 0):
            b.submit(f"{priority}", BLOCK, 2, priority=priority)
        b.finish()
        assert [name for name, _ in b.engine.answers] == ["0", "1", "2", "3"], "O0: least priority first"

    # --- everything at once -------------------------------------------------------------------------

    def test_random_batches(self, bench: Any, seeded: Any) -> None:
        """All of the above, over random limits, arrivals and aborts."""
        examples = self.random_batches or hypothesis_settings().max_examples

        @hypothesis_settings(max_examples=examples, deadline=None)
        @given(batches(all_fit=not self.claims_p2))
        def every_batch_ends_well(batch: Batch) -> None:
            b = bench(**asdict(batch.limits))
            play(batch.events, b)
            b.finish()

        seeded(every_batch_ends_well)()

    def _skip_without_p2(self) -> None:
        if not self.claims_p2:
            pytest.skip("P2 is not claimed: what can never fit waits for ever")

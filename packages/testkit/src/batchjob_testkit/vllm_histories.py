"""Random histories of vLLM's real scheduler under a class of yours, looked at after every event.

.. code-block:: console

    $ python -m batchjob_testkit.vllm_histories --scheduler my_scheduler.MyScheduler --events 100000

An engine of random limits gets requests, steps, aborts, resets of its cache and pauses; requests share
prefixes, name adapters, wait for grammars, load and send blocks, take turns. After every event its own
ledger is looked at, and with ``--rules`` the queue is in lockstep with the specification and every
invariant of that holds. In the end each request has one outcome, with its tokens, and the pool is whole.

Left out is what vLLM's own scheduler fails at: adapters and sliding windows beside several steps in flight,
loads that are offered again after one that failed or that brought the only token, and what the flags below
say; under async scheduling some versions run a session twice. Not tried are sessions beside drafts, loads or
several steps in flight, and loads beside several KV cache groups.

A failure prints the engine, what happened on it, and the command that makes it happen again.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from inspect import signature
from random import Random
from typing import Any

from vllm.config import SchedulerConfig
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from batchjob_spec.blocks import blocks_for
from batchjob_spec.queue import Settings
from batchjob_testkit.engines import sampled_token
from batchjob_testkit.vllm_lockstep import LockstepQueue, SchedulerView
from batchjob_testkit.vllm_scheduler import EngineOptions, RequestOptions, VirtualEngine

BLOCK = 4
MOST_LIVE = 10
MOST_TOKENS = 60
SHOWN_EVENTS = 60

_HAS_WATERMARK = "watermark" in signature(SchedulerConfig).parameters
_DRAFTS_IN_FLIGHT = hasattr(Scheduler, "_reserve_prefill_lookahead")
"""Before 0.28, vLLM schedules a negative number of tokens with a draft in flight, and ends over it."""
_DROPS_STALE_OUTPUT = "drop_stale_output" in signature(vars(Scheduler)["_preempt_request"]).parameters
"""Before 0.27, vLLM repeats or loses what was in flight when its cache was reset under what ran."""


class History:
    """One engine and what happens on it, chosen by ``random``."""

    def __init__(self, scheduler_cls: type[Any], random: Random, *, rules: bool) -> None:
        self.events: Counter[str] = Counter()
        self.log: list[str] = []
        self._random = random
        self._settings = _settings(random)
        if not rules:  # blend leaves free what the lockstep compares
            self._settings = replace(self._settings, order=random.choice(["lpt", "blend"]))
        self.options = _options(random, self._settings, is_async=issubclass(scheduler_cls, AsyncScheduler))
        self.engine = VirtualEngine(scheduler_cls, self.options)
        self._scheduler = self.engine.scheduler
        self._live: list[str] = []
        self._sessions: set[str] = set()
        self._grammars: set[str] = set()
        self._turns: dict[str, list[int]] = {}
        self._lockstep = (
            LockstepQueue(self._scheduler, self._settings, priority_policy=self.options.policy == "priority")
            if rules and self.options.kv_groups == ("full",)
            else None
        )

    def run(self, events: int) -> None:
        """Let so many events happen, then let everything come to its end."""
        # Each says what it did, or nothing.
        weighted: dict[Callable[[], str], int] = {
            self._step: 50,
            self._submit: 20,
            self._abort: 3,
            self._finish_transfer: 6,
            self._compile_grammar: 4,
            self._next_turn: 4,
            self._reset_prefix_cache: 1,
            self._pause: 2,
        }
        choices, weights = list(weighted), list(weighted.values())
        for _ in range(events):
            self._happen(self._random.choices(choices, weights)[0])
        self._finish()

    def describe(self) -> str:
        """The engine and what happened on it last."""
        return "\n  ".join([f"{self.options}", f"({len(self.log)} events)", *self.log[-SHOWN_EVENTS:]])

    # --- what happens -------------------------------------------------------------------------------------

    def _happen(self, event: Callable[[], str]) -> None:
        name = event.__name__.strip("_")
        self.log.append(name)
        said = event()
        if not said:  # there was nothing to happen to
            self.log.pop()
            return
        self.events[name] += 1
        self.log[-1] = f"{name} {said}, {self.engine.num_free_blocks} free"
        self.engine.check_ledger()
        if self._lockstep is not None:
            self._lockstep.look()

    def _step(self) -> str:
        self._report_ends()
        scheduled = self.engine.step()
        self._report_ends()
        return f"{scheduled}"

    def _submit(self) -> str:
        if len(self._live) >= MOST_LIVE:
            return ""
        random, engine = self._random, self.engine
        name = f"{len(engine.requests)}#job_name[{random.randrange(4)}]#"
        options = self._request_options()
        prompt = [random.randrange(2)] * random.randint(1, MOST_TOKENS)
        if random.random() < 0.5:  # nothing shared
            prompt[0] = 100 + len(engine.requests)
        decode = random.randint(1, MOST_TOKENS)
        engine.submit(
            name,
            prompt,
            decode,
            max_tokens=random.choice([None, random.randint(1, MOST_TOKENS)]),
            priority=random.randrange(3),
            options=options,
            **({} if options.structured else {"min_tokens": random.choice([0, 0, 1])}),
        )
        self._live.append(name)
        if options.structured:
            self._grammars.add(name)
        if options.session:
            self._sessions.add(name)
        return f"{name} {len(prompt)} + {decode} {options}"

    def _abort(self) -> str:
        name = self._any(self._live)
        if name:
            self.engine.abort(name)
        return name

    def _finish_transfer(self) -> str:
        name = self._any([*self.engine.loading_ids, *self.engine.sending_ids])
        if name in self.engine.sending_ids:
            self.engine.finish_send(name)
        elif name:
            self.engine.finish_load(name, failed=self._random.random() < 0.3)
        return name

    def _compile_grammar(self) -> str:
        name = self._any(sorted(self._grammars & {*self._live}))
        if name:
            self._grammars.remove(name)
            self.engine.compile_grammar(name)
        return name

    def _next_turn(self) -> str:
        waiting = [name for name in sorted(self._sessions) if self._waits_for_its_turn(name)]
        name = self._any(waiting)
        if not name:
            return ""
        if self.engine.requests[name].num_tokens > MOST_TOKENS or self._random.random() < 0.3:
            self._sessions.remove(name)
            self.engine.end_session(name)
        else:
            decode = self._random.randint(1, 20)
            options = RequestOptions(session=True)
            self.engine.submit(name, [7] * self._random.randint(1, 20), decode, options=options)
        return name

    def _reset_prefix_cache(self) -> str:
        # Under blocks that are loaded or sent, or that a session keeps, vLLM refuses it, by an error.
        held = self._sessions or self.options.kv_load_failure_policy
        in_flight = self.engine.num_in_flight and not _DROPS_STALE_OUTPUT
        under_what_runs = not held and not in_flight and self._random.random() < 0.5
        return str(self._scheduler.reset_prefix_cache(reset_running_requests=under_what_runs))

    def _pause(self) -> str:
        state = self._random.choice([PauseState.UNPAUSED, PauseState.UNPAUSED, *PauseState])
        self._scheduler.set_pause_state(state)
        return str(state.name)

    # --- the end ------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._scheduler.set_pause_state(PauseState.UNPAUSED)
        most_steps = 1000 + 2 * MOST_TOKENS * MOST_LIVE * MOST_LIVE
        for _ in range(most_steps):
            if not self._live and not self._scheduler.requests:
                break
            for event in (self._compile_grammar, self._next_turn, self._finish_transfer, self._step):
                self._happen(event)
        for _ in range(4):
            self._happen(self._step)  # what is in flight comes in
        self.engine.check_integrity()
        for name, outcome in self.engine.outcomes.items():
            self._check_outcome(name, outcome)

    def _check_outcome(self, name: str, outcome: Any) -> None:
        request = self.engine.requests[name]
        if request.resumable:
            return
        asked = self.engine.decode_tokens[name]
        whole = outcome.finish_reason in {"stop", "length"}
        count = min(asked, request.max_tokens) if whole else len(outcome.tokens)
        expected = tuple(sampled_token(position, asked) for position in range(1, count + 1))
        assert outcome.tokens == expected, f"P3: {name} got {outcome}, expected {expected}"
        if outcome.finish_reason == "error" and self.options.kv_groups == ("full",):
            self._check_failure(request, outcome)

    def _check_failure(self, request: Any, outcome: Any) -> None:
        connected = self.options.kv_load_failure_policy is not None
        # Where a connector hands blocks on, what is in flight at a preemption is lost.
        lost = 1 + 2 * self._scheduler.num_spec_tokens if connected and self.options.async_scheduling else 0
        view = SchedulerView(self._scheduler)
        slots = request.num_tokens + lost + view.padding_tokens + view.lookahead_tokens
        too_large = blocks_for(slots, BLOCK) > self.options.usable_blocks
        failed_load = self.options.kv_load_failure_policy == "fail" and outcome.stop_reason is None
        assert too_large or failed_load, f"P2: {request.request_id} fits and failed with {outcome}"

    # --- helpers ------------------------------------------------------------------------------------------

    def _report_ends(self) -> None:
        """What has ended since; the queue hears of it in the same order."""
        ended = [name for name in self._live if name in self.engine.outcomes]
        for name in ended:
            self._live.remove(name)
            if self._lockstep is not None:
                reason = self.engine.outcomes[name].finish_reason
                self._lockstep.spec.end(name, by_itself=reason in {"stop", "length"})

    def _waits_for_its_turn(self, name: str) -> bool:
        request = self.engine.requests[name]
        return bool(request.status == RequestStatus.WAITING_FOR_STREAMING_REQ)

    def _any(self, names: list[str]) -> str:
        return self._random.choice(names) if names else ""

    def _request_options(self) -> RequestOptions:
        random, options = self._random, self.options
        script = {
            "tokens": random.randrange(MOST_TOKENS) // BLOCK * BLOCK,
            "is_async": random.random() < 0.6,
            "defers": random.choice([0, 0, 3]),
            "send": random.random() < 0.2,
        }
        return RequestOptions(
            adapter=random.randrange(4) if options.max_loras else 0,
            structured=random.random() < 0.1,
            # Two sessions that hold the whole pool between them wait for each other for ever.
            session=_has_sessions(options) and not self._sessions & {*self._live} and random.random() < 0.1,
            kv_transfer=script if options.kv_load_failure_policy and random.random() < 0.5 else None,
        )


def _settings(random: Random) -> Settings:
    return Settings(
        max_jobs=random.choice([0, 1, 2, 20]),
        reserve_margin_blocks=random.choice([0, 1, 2, 64]),
        reserve_max_blocks=random.choice([0, 3, 8, 64]),
        low_available_tokens_threshold=random.choice([0, 16, 40, 4096]),
        short_decode_token_threshold=random.choice([5, 20, 32]),
        ewma_alpha=random.choice([0.1, 0.5, 1.0]),
        look_ahead=random.random() < 0.5,
    )


def _options(random: Random, settings: Settings, *, is_async: bool) -> EngineOptions:
    chunked = random.random() < 0.8
    step_tokens = random.choice([3, 8, 20, 64]) if chunked else 256
    connected = random.random() < 0.3
    in_flight = None if is_async else random.choice([1, 1, 2, 3])
    one_step_at_a_time = in_flight in {None, 1}
    drafts = step_tokens > 6 and (one_step_at_a_time or _DRAFTS_IN_FLIGHT) and random.random() < 0.25
    prefix_caching = random.random() < 0.5
    several_groups = not connected and random.random() < 0.4
    alike = [] if prefix_caching else [("full", "full"), ("full", "mamba")]
    return EngineOptions(
        num_blocks=1 + random.choice([1, 2, 5, 12, 20, 30, 60]),
        block_size=BLOCK,
        max_num_seqs=random.choice([1, 2, 3, 6]) if step_tokens > 6 else 3,
        max_num_batched_tokens=step_tokens,
        max_model_len=256,
        policy=random.choice(["fcfs", "fcfs", "priority"]),
        enable_chunked_prefill=chunked,
        async_scheduling=is_async,
        enable_prefix_caching=prefix_caching,
        batches_in_flight=in_flight,
        # How much a window holds follows from the batches that vLLM is configured to have in flight.
        kv_groups=random.choice([("full", "window:8"), *alike])
        if several_groups and one_step_at_a_time
        else ("full",),
        speculative_tokens=2 if drafts else 0,
        # What runs and is not in a step is not counted there by vLLM, which ends the engine over it.
        max_loras=random.choice([0, 0, 1, 2]) if one_step_at_a_time else 0,
        kv_load_failure_policy=random.choice(["recompute", "fail"]) if connected else None,
        scheduler_config={
            **({"watermark": random.choice([0.0, 0.0, 0.2])} if _HAS_WATERMARK else {}),
            "scheduler_reserve_full_isl": random.random() < 0.7,
        },
        additional_config={"batch_job_sched_config": {"enabled": True, **asdict(settings)}},
    )


def _has_sessions(options: EngineOptions) -> bool:
    """Whether sessions are tried: one step at a time, without drafts and loads."""
    one_step_at_a_time = not options.async_scheduling and options.batches_in_flight == 1
    return one_step_at_a_time and not options.speculative_tokens and not options.kv_load_failure_policy


def run_histories(
    scheduler_cls: type[Any], events: int, seed: int, *, rules: bool, length: int = 400
) -> Counter[str]:
    """Histories of ``length`` events and their ends until so many have happened; returns how many of each.

    Raises:
        AssertionError: with the history and the command that repeats it.
    """
    happened: Counter[str] = Counter()
    started = seed
    while happened.total() < events:
        history = History(scheduler_cls, Random(started), rules=rules)
        try:
            history.run(length)
        except Exception as error:
            again = _command(scheduler_cls, started, rules=rules)
            raise AssertionError(f"{error!r}\n{history.describe()}\nAgain: {again}") from error
        happened += history.events
        started += 1
    return happened


def _command(scheduler_cls: type[Any], seed: int, *, rules: bool) -> str:
    name = f"{scheduler_cls.__module__}.{scheduler_cls.__qualname__}"
    switch = " --rules" if rules else ""
    return f"python -m batchjob_testkit.vllm_histories --scheduler {name} --events 1 --seed {seed}{switch}"


def main(arguments: list[str] | None = None) -> None:
    """Run the histories that the command line asks for."""
    parser = argparse.ArgumentParser(description="Random histories of vLLM's scheduler under a class.")
    parser.add_argument("--scheduler", required=True, metavar="MODULE.CLASS")
    parser.add_argument("--events", type=int, default=10_000, help="at least so many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first history (default: %(default)s)")
    parser.add_argument("--rules", action="store_true", help="compare with the specification, too")
    chosen = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    scheduler_cls = resolve_obj_by_qualname(chosen.scheduler)
    happened = run_histories(scheduler_cls, chosen.events, chosen.seed, rules=chosen.rules)
    rate = happened.total() / (time.monotonic() - began)
    for event, count in happened.most_common():
        print(f"{count:9} {event}")
    print(f"{happened.total():9} events in all, none failed; {rate:.0f} a second")


if __name__ == "__main__":
    main()

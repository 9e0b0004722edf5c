"""Everything that vLLM's scheduler does goes on working over our queue.

In each test the engine's own ledger is looked at after every step: each unfinished request is in one
place, ``len`` is right, no block is lost; and in the end each has its tokens and the pool is whole.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from typing import ClassVar

import pytest
from vllm.config import SchedulerConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from batchjob_scheduler.compat import offers
from batchjob_scheduler.scheduler import BatchJobAwareAsyncScheduler, BatchJobAwareScheduler
from batchjob_testkit.engines import sampled_token
from batchjob_testkit.vllm_scheduler import EngineOptions, FakeGrammar, RequestOptions, VirtualEngine

pytestmark = pytest.mark.vllm

BLOCK = 16

# Where the engine is to be starved: the look-ahead and the reserve would avoid it.
FULL_TILT = {"look_ahead": False, "reserve_margin_blocks": 0, "reserve_max_blocks": 0}


class CheckedEngine(VirtualEngine):
    """Looks at the ledger of the engine after every step."""

    def step(self, **hooks):
        scheduled = super().step(**hooks)
        self.check_ledger()
        return scheduled

    def finish(self):
        """Run to the end; every request that was not aborted or failed has all its tokens."""
        self.run()
        self.check_integrity()
        for name, outcome in self.outcomes.items():
            asked = 0 if self.requests[name].pooling_params else self.decode_tokens[name]
            tokens = tuple(sampled_token(position, asked) for position in range(1, asked + 1))
            whole = outcome.finish_reason in {"stop", "length"}
            expected = tokens[: self.requests[name].max_tokens if whole else len(outcome.tokens)]
            assert outcome.tokens == expected, name
        return Counter(outcome.finish_reason for outcome in self.outcomes.values())


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def make_engine(request):
    """Makes an engine under our class, synchronous and asynchronous."""

    def make(settings=None, **options):
        cls = BatchJobAwareAsyncScheduler if request.param else BatchJobAwareScheduler
        section = {"batch_job_sched_config": {"enabled": True, **(settings or {})}}
        return CheckedEngine(
            cls, EngineOptions(async_scheduling=request.param, additional_config=section, **options)
        )

    return make


def submit_many(engine, count=24, *, options=None, prompt=lambda number: 1 + number * 37 % 90):
    """Requests of three jobs, of many lengths; returns their IDs."""
    names = [f"#job_name[job{number % 3}]#{number:02}" for number in range(count)]
    for number, name in enumerate(names):
        engine.submit(name, prompt(number), 1 + number * 23 % 70, options=options and options(number))
    return names


# --- how a step is filled -----------------------------------------------------------------------------


@pytest.mark.parametrize("usable_blocks", [12, 40])
@pytest.mark.parametrize("step_tokens", [7, 64])
def test_chunked_prefill(make_engine, usable_blocks, step_tokens):
    e = make_engine(
        FULL_TILT, num_blocks=usable_blocks + 1, max_num_batched_tokens=step_tokens, max_num_seqs=7
    )
    submit_many(e)
    assert e.finish() == {"stop": 24}
    assert any(sum(step.values()) == step_tokens for step in e.steps)


def test_without_chunked_prefill_a_prompt_is_computed_at_once(make_engine):
    e = make_engine(enable_chunked_prefill=False, max_num_batched_tokens=256, max_model_len=256)
    names = submit_many(e)
    assert e.finish() == {"stop": 24}
    first = {name: next(step[name] for step in e.steps if name in step) for name in names}
    assert first == {name: e.requests[name].num_prompt_tokens for name in names}


def test_a_long_prompt_is_cut_so_that_others_fit_beside_it(make_engine):
    e = make_engine(max_num_batched_tokens=128, scheduler_config={"long_prefill_token_threshold": 32})
    e.submit("long", 300, 5)
    e.submit("short", 20, 5)
    e.step()
    assert e.steps[0] == {"long": 32, "short": 20}
    assert e.finish() == {"stop": 2}


def test_one_request_at_a_time(make_engine):
    e = make_engine(max_num_seqs=1)
    submit_many(e)
    assert e.finish() == {"stop": 24}
    assert all(len(step) <= 1 for step in e.steps)


@pytest.mark.skipif(
    "max_num_active_seqs" not in inspect.signature(SchedulerConfig).parameters,
    reason="this vLLM has one limit of what runs",
)
def test_fewer_are_admitted_than_there_are_slots(make_engine):
    e = make_engine(max_num_seqs=8, scheduler_config={"max_num_active_seqs": 3})
    submit_many(e)
    assert e.finish() == {"stop": 24}
    assert max(map(len, e.steps)) == 3
    assert e.scheduler._engine_view.max_running == 3


def test_a_pool_of_one_block(make_engine):
    e = make_engine(num_blocks=2)
    for number in range(6):
        e.submit(f"{number}", 10, 3)
    assert e.finish() == {"stop": 6}


HAS_WATERMARK = "watermark" in inspect.signature(SchedulerConfig).parameters


@pytest.mark.skipif(not HAS_WATERMARK, reason="this vLLM has no watermark")
def test_a_watermark_is_kept_free_while_others_run(make_engine):
    e = make_engine(FULL_TILT, num_blocks=21, scheduler_config={"watermark": 0.25})
    e.submit("first", 4 * BLOCK, 3)
    e.submit("large", 12 * BLOCK, 3)
    e.submit("small", 6 * BLOCK, 3)
    e.step()
    # 20 blocks, 5 of them kept: beside the first, 11 may be used, so the large one waits and nothing else.
    assert set(e.steps[0]) == {"first", "small"}
    assert e.finish() == {"stop": 3}


@pytest.mark.parametrize("whole_prompt", [True, False])
def test_admission_by_the_whole_prompt_or_by_its_first_chunk(make_engine, whole_prompt):
    e = make_engine(
        FULL_TILT,
        num_blocks=13,
        max_num_batched_tokens=32,
        scheduler_config={"scheduler_reserve_full_isl": whole_prompt},
    )
    submit_many(e)
    assert e.finish() == {"stop": 24}


# --- prefix caching -----------------------------------------------------------------------------------


@pytest.mark.parametrize("usable_blocks", [14, 200])
def test_shared_templates(make_engine, usable_blocks):
    e = make_engine(num_blocks=usable_blocks + 1, enable_prefix_caching=True)
    for number in range(24):
        template = [7 + number % 3] * (4 * BLOCK)
        e.submit(f"#job_name[{number % 3}]#{number}", [*template, 100 + number], 1 + number * 23 % 70)
    assert e.finish() == {"stop": 24}
    computed = sum(step.get(name, 0) for step in e.steps for name in e.requests)
    if usable_blocks == 200:
        assert computed < sum(request.num_tokens for request in e.requests.values())


def test_resetting_the_prefix_cache_preempts_what_runs_and_loses_nothing(make_engine):
    e = make_engine(num_blocks=40, enable_prefix_caching=True)
    submit_many(e)
    for _ in range(6):
        e.step()
        e.step()
        assert e.scheduler.reset_prefix_cache(reset_running_requests=True)
        e.check_ledger()
        assert not e.scheduler.running
    assert e.num_preemptions > 0
    assert e.finish() == {"stop": 24}


# --- structured output --------------------------------------------------------------------------------


def test_a_request_that_waits_for_its_grammar_holds_nobody_up(make_engine):
    e = make_engine(max_num_seqs=2)
    e.submit("structured", 40, 5, options=RequestOptions(structured=True))
    names = [e.submit(f"{number}", 20, 5).request_id for number in range(4)]
    for _ in range(20):
        e.step()
    assert e.outcomes.keys() == set(names), "the others wait for nothing"
    for _ in range(3):
        assert e.step() == {}
    e.compile_grammar("structured")
    assert e.finish() == {"stop": 5}


def test_abort_while_waiting_for_a_grammar(make_engine):
    e = make_engine()
    e.submit("structured", 40, 5, options=RequestOptions(structured=True))
    e.submit("plain", 40, 5)
    e.step()
    e.abort("structured")
    e.check_ledger()
    assert e.finish() == {"stop": 1, "abort": 1}


@pytest.mark.skipif(
    "grammar_compile_error_reqs" not in inspect.getsource(Scheduler.__init__),
    reason="this vLLM ends the engine over a wrong grammar",
)
def test_a_wrong_grammar_ends_only_its_request(make_engine):
    e = make_engine()
    e.submit("wrong", 40, 5, options=RequestOptions(structured=True))
    e.submit("plain", 40, 5)
    e.step()
    e.compile_grammar("wrong", ValueError("no such grammar"))
    assert e.finish() == {"stop": 1, "error": 1}


def test_a_token_against_the_grammar_ends_only_its_request(make_engine):
    e = make_engine()
    e.submit("structured", 40, 9, options=RequestOptions(structured=True))
    e.submit("plain", 40, 9)
    e.compile_grammar("structured", FakeGrammar(rejected_token=sampled_token(4, 9)))
    assert e.finish() == {"stop": 1, "error": 1}
    assert len(e.outcomes["structured"].tokens) == 4


# --- speculative decoding -----------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, FULL_TILT])
@pytest.mark.parametrize("usable_blocks", [11, 60])
def test_draft_tokens_are_accepted_and_rejected(make_engine, usable_blocks, settings):
    e = make_engine(settings, num_blocks=usable_blocks + 1, speculative_tokens=3)
    assert e.scheduler.num_lookahead_tokens == 3
    submit_many(e)
    assert e.finish() == {"stop": 24}


@pytest.mark.parametrize("settings", [{}, FULL_TILT])
@pytest.mark.parametrize("usable_blocks", [6, 11, 60])
def test_drafts_from_the_prompt_ask_for_no_look_ahead_slots(usable_blocks, settings):
    """vLLM has no async scheduling with them."""
    section = {"batch_job_sched_config": {"enabled": True, **settings}}
    options = EngineOptions(
        num_blocks=usable_blocks + 1,
        speculative_tokens=3,
        speculative_method="ngram",
        additional_config=section,
    )
    e = CheckedEngine(BatchJobAwareScheduler, options)
    assert (e.scheduler.num_spec_tokens, e.scheduler.num_lookahead_tokens) == (3, 0)
    e.submit("fills the pool", usable_blocks * BLOCK - 10, 10)
    submit_many(e, prompt=lambda number: 1 + number * 7 % 20)
    assert e.finish() == {"stop": 25}


def test_what_fits_only_without_look_ahead_slots_ends_with_an_error_and_the_others_go_on(make_engine):
    e = make_engine(num_blocks=5, speculative_tokens=3)
    e.submit("too large", 4 * BLOCK - 1, 1)
    e.submit("fits", 4 * BLOCK - 3, 1)
    assert e.finish() == {"stop": 1, "error": 1}
    assert e.outcomes["fits"].finish_reason == "stop"


@pytest.mark.parametrize(("usable_blocks", "expected"), [(4, {"error": 2}), (5, {"stop": 2})])
def test_no_request_waits_for_ever_for_the_drafts_that_it_is_padded_with(
    make_engine, usable_blocks, expected
):
    """All but the last token are found in the cache, and vLLM pads what then computes a single token."""
    e = make_engine(num_blocks=usable_blocks + 1, speculative_tokens=8, enable_prefix_caching=True)
    for name in ("first", "second"):
        e.submit(name, [7] * (3 * BLOCK + 1), 1)
        e.run()
    assert e.finish() == expected


def test_look_ahead_slots_beyond_the_longest_sequence_are_not_asked_for(make_engine):
    e = make_engine(num_blocks=5, speculative_tokens=3, max_model_len=4 * BLOCK)
    e.submit("fits", 4 * BLOCK - 1, 1)
    assert e.finish() == {"stop": 1}


# --- adapters -----------------------------------------------------------------------------------------


def test_adapters_that_find_no_place_are_skipped_and_taken_up_again(make_engine):
    e = make_engine(max_loras=1, max_num_seqs=8)
    names = submit_many(e, options=lambda number: RequestOptions(adapter=number % 3))
    assert e.finish() == {"stop": 24}
    adapters = {name: number % 3 for number, name in enumerate(names)}
    for step in e.steps:
        assert len({adapters[name] for name in step} - {0}) <= 1


def test_a_skipped_adapter_does_not_hold_up_what_needs_none(make_engine):
    e = make_engine(max_loras=1)
    e.submit("first", 20, 10, options=RequestOptions(adapter=1))
    e.submit("other adapter", 20, 10, options=RequestOptions(adapter=2))
    e.submit("none", 20, 10)
    e.step()
    assert set(e.steps[0]) == {"first", "none"}
    assert len(e.scheduler.waiting) == 1
    assert e.finish() == {"stop": 3}


# --- several engines and several stages ---------------------------------------------------------------


@pytest.mark.skipif(
    "throttle_prefills" not in inspect.signature(Scheduler.schedule).parameters,
    reason="this vLLM throttles no prefills",
)
def test_throttled_prefills_wait_and_are_taken_up_again(make_engine):
    e = make_engine()
    e.submit("running", 20, 12)
    e.step()
    e.step()
    e.submit("waiting", 40, 5)
    for _ in range(3):
        assert "waiting" not in e.step(throttle_prefills=True)
    assert len(e.scheduler.waiting) == 1
    e.step(throttle_prefills=False)
    assert "waiting" in e.steps[-1]
    assert e.finish() == {"stop": 2}


# Before it counted the output that a preemption makes stale, vLLM itself mistook tokens of what it preempted
# at this depth.
DEPTHS = [2, 4] if offers(Request, "num_stale_output_tokens") else [2]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("usable_blocks", [12, 60])
def test_several_batches_in_flight(make_engine, depth, usable_blocks):
    e = make_engine(
        FULL_TILT, num_blocks=usable_blocks + 1, batches_in_flight=depth, max_num_batched_tokens=64
    )
    submit_many(e)
    assert e.finish() == {"stop": 24}


# --- KV cache from elsewhere --------------------------------------------------------------------------


def loading(**script):
    return RequestOptions(kv_transfer=script)


@pytest.fixture
def connected(make_engine):
    def make(settings=None, policy="recompute", scheduling="fcfs", **options):
        return make_engine(settings, kv_load_failure_policy=policy, policy=scheduling, **options)

    return make


def test_a_load_that_its_request_waits_for_holds_blocks_and_nobody_up(connected):
    e = connected(num_blocks=30)
    e.submit("loading", 6 * BLOCK + 1, 5, options=loading(tokens=6 * BLOCK, is_async=True))
    e.step()
    assert e.loading_ids == ["loading"]
    assert e.num_free_blocks < 29
    names = [e.submit(f"{number}", 20, 5).request_id for number in range(4)]
    while not e.outcomes.keys() >= set(names):
        e.step()
    e.finish_load("loading")
    assert e.finish() == {"stop": 5}
    assert sum(step.get("loading", 0) for step in e.steps) < 6 * BLOCK, "what was loaded is not computed"


@pytest.mark.parametrize("is_async", [False, True])
def test_many_loads_in_a_small_pool(connected, is_async):
    e = connected(num_blocks=16)
    submit_many(e, options=lambda number: loading(tokens=number * 5, is_async=is_async and number % 2 == 0))
    assert e.finish() == {"stop": 24}


def test_a_connector_that_cannot_say_yet_is_asked_again(connected):
    e = connected(max_num_seqs=2)
    e.submit("deferred", 40, 5, options=loading(tokens=32, defers=5))
    e.submit("plain", 40, 5)
    e.step()
    assert set(e.steps[0]) == {"plain"}
    assert e.finish() == {"stop": 2}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_failed_load_is_computed_or_ends_its_request(connected, policy):
    e = connected(policy=policy, num_blocks=30)
    e.submit("failing", 6 * BLOCK + 1, 5, options=loading(tokens=6 * BLOCK, is_async=True))
    e.submit("plain", 40, 5)
    e.step()
    e.finish_load("failing", failed=True)
    expected = {"stop": 2} if policy == "recompute" else {"stop": 1, "error": 1}
    assert e.finish() == expected


def test_a_load_of_the_only_token_keeps_no_load_behind_it_waiting_for_ever(connected):
    """None of it counts as computed, and vLLM asks the connector again before it looks at the others."""
    e = connected(num_blocks=13)
    e.submit("only", 1, 3, options=loading(tokens=1, is_async=True))
    e.step()
    # Three blocks each; together they reserve more than is free then.
    e.submit("first", 7 * BLOCK, 3, options=loading(tokens=3 * BLOCK, is_async=True))
    e.step()
    e.submit("second", 8 * BLOCK, 3, options=loading(tokens=3 * BLOCK, is_async=True))
    e.step()
    assert e.loading_ids == ["only", "first", "second"]
    assert e.finish() == {"stop": 3}


def test_a_failed_load_goes_on_before_a_more_urgent_request_that_would_load(connected):
    """vLLM keeps the blocks for the first one, and up to 0.30 looked at the second one first."""
    e = connected(num_blocks=13, scheduling="priority")
    e.submit("failing", 9 * BLOCK + 1, 3, priority=2, options=loading(tokens=6 * BLOCK, is_async=True))
    e.step()
    e.submit("urgent", 9 * BLOCK + 1, 3, priority=0, options=loading(tokens=6 * BLOCK, is_async=True))
    e.finish_load("failing", failed=True)
    assert e.finish() == {"stop": 2}


def test_what_outgrows_the_pool_ends_with_an_error_though_its_last_output_is_dropped(connected):
    """Where blocks are handed on, vLLM 0.27 drops what is in flight at a preemption and computes it anew."""
    e = connected(num_blocks=3)
    e.submit("outgrows", BLOCK, 3 * BLOCK)
    e.submit("fits", BLOCK, 3)
    assert e.finish() == {"error": 1, "stop": 1}
    assert "the whole pool has 2 of 16 tokens" in e.outcomes["outgrows"].stop_reason


@pytest.mark.parametrize(("usable_blocks", "expected"), [(4, {"error": 1}), (5, {"stop": 1})])
def test_no_load_waits_for_ever_for_the_blocks_of_a_step_with_drafts(connected, usable_blocks, expected):
    """From 0.32 on, vLLM starts a load only beside those."""
    e = connected(num_blocks=usable_blocks + 1, speculative_tokens=2)
    e.submit("loads", 4 * BLOCK - 5, 1, options=loading(tokens=4 * BLOCK, is_async=True))
    assert e.finish() == expected


def test_abort_while_loading_keeps_the_blocks_until_the_load_has_ended(connected):
    e = connected(num_blocks=30)
    e.submit("loading", 6 * BLOCK + 1, 5, options=loading(tokens=6 * BLOCK, is_async=True))
    e.step()
    free = e.num_free_blocks
    e.abort("loading")
    e.step()
    e.check_ledger()
    assert e.num_free_blocks == free
    assert e.finish() == {"abort": 1}


def test_blocks_that_are_sent_after_the_end_keep_nobody_waiting_for_ever(connected):
    e = connected(num_blocks=11)
    e.submit("sent", 8 * BLOCK, 1, options=loading(send=True))
    e.submit("next", 8 * BLOCK, 1)
    for _ in range(8):
        e.step()
    assert e.sending_ids == ["sent"]
    assert "next" not in e.outcomes
    e.finish_send("sent")
    assert e.finish() == {"stop": 2}


def test_what_fits_beside_blocks_that_are_sent_is_served(connected):
    e = connected(num_blocks=11)
    e.submit("sent", 8 * BLOCK, 1, options=loading(send=True))
    e.submit("large", 8 * BLOCK, 1)
    e.submit("small", BLOCK, 1)
    for _ in range(8):
        e.step()
    assert e.outcomes.keys() == {"sent", "small"}
    e.finish_send("sent")
    assert e.finish() == {"stop": 3}


# --- encoder inputs -----------------------------------------------------------------------------------


def test_encoder_inputs_that_find_no_place_wait_for_the_next_step(make_engine):
    e = make_engine(encoder_tokens=40)
    for number in range(6):
        options = RequestOptions(encoder_inputs=((2, 30),))
        e.submit(f"{number}", 50, 5, options=options)
    e.submit("plain", 20, 5)
    assert e.finish() == {"stop": 7}


# --- several KV cache groups --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "groups",
    [("full", "full"), ("full", "window:32"), ("window:32",), ("full", "mamba"), ("mamba",)],
    ids="+".join,
)
class TestSeveralKVCacheGroups:
    """Each group takes its own blocks for a request, from one pool."""

    limits: ClassVar = {"max_num_batched_tokens": 32, "max_model_len": 2048}

    @pytest.fixture
    def most_blocks(self, make_engine, groups):
        """The most that a request of 200 tokens holds at a time."""
        # A window holds what the next token looks back on and what the steps in flight compute, from the
        # middle of a block on; older versions think of one step.
        e = make_engine()
        two_steps = e.options.async_scheduling and hasattr(e.scheduler.vllm_config, "max_in_flight_tokens")
        in_flight = 32 * (2 if two_steps else 1)
        window = -(-(31 + in_flight) // BLOCK) + 1
        of_group = {"full": 13, "window:32": window, "mamba": 1}
        return sum(of_group[kind] for kind in groups)

    def test_what_just_fits_is_served(self, make_engine, groups, most_blocks):
        e = make_engine(kv_groups=groups, num_blocks=most_blocks + 1, **self.limits)
        e.submit("fits", 200, 1)
        assert e.finish() == {"stop": 1}

    def test_what_can_never_fit_ends_with_an_error(self, make_engine, groups, most_blocks):
        e = make_engine(kv_groups=groups, num_blocks=most_blocks, **self.limits)
        e.submit("too large", 200, 1)
        e.submit("small", 10, 1)
        assert e.finish() == ({"stop": 1, "error": 1} if most_blocks > 1 else {"error": 2})
        assert e.outcomes["too large"].finish_reason == "error"

    def test_a_starved_pool(self, make_engine, groups, most_blocks):
        e = make_engine(FULL_TILT, kv_groups=groups, num_blocks=most_blocks + 1, **self.limits)
        submit_many(e)
        assert e.finish() == {"stop": 24}

    def test_as_many_run_beside_one_another_as_there_is_room_for(self, make_engine, groups, most_blocks):
        e = make_engine(kv_groups=groups, num_blocks=16 * most_blocks + 10, **self.limits)
        for number in range(16):
            e.submit(f"{number}", 40, 60)
        e.run()
        assert max(map(len, e.steps)) == 16


# --- pooling ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("usable_blocks", [8, 60])
def test_pooling_models_decode_nothing(make_engine, usable_blocks):
    e = make_engine(runner="pooling", num_blocks=usable_blocks + 1, max_num_batched_tokens=64)
    submit_many(e)
    assert e.finish() == {"stop": 24}


def test_a_pooling_request_larger_than_the_pool_ends_with_an_error(make_engine, monkeypatch):
    e = make_engine(runner="pooling", num_blocks=5)
    outputs = {}
    update = e.scheduler.update_from_output

    def noting(*arguments):
        of_clients = update(*arguments)
        outputs.update((output.request_id, output) for of in of_clients.values() for output in of.outputs)
        return of_clients

    monkeypatch.setattr(e.scheduler, "update_from_output", noting)
    e.submit("giant", 5 * BLOCK, 1)
    e.submit("small", BLOCK, 1)
    assert e.finish() == {"stop": 1, "error": 1}
    assert "5 KV cache blocks" in outputs["giant"].stop_reason
    # Without a tensor the front end takes the end for that of a text, and ends itself.
    assert outputs["giant"].pooling_output is not None


# --- pauses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_pause_starts_nothing_and_loses_nothing(make_engine, state):
    e = make_engine(num_blocks=30, max_num_seqs=4)
    submit_many(e)
    e.step()
    e.step()
    e.scheduler.set_pause_state(state)
    started = {name for step in e.steps for name in step}
    e.step()  # what is in flight comes in
    ended = len(e.outcomes)
    for _ in range(100):
        e.step()
    assert {name for step in e.steps for name in step} == started
    assert len(e.outcomes) == (len(started) if state == PauseState.PAUSED_NEW else ended)
    e.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert e.finish() == {"stop": 24}


def test_sleeping_and_waking_up(make_engine):
    """To sleep the engine pauses and gives up its KV cache."""
    e = make_engine(num_blocks=30, enable_prefix_caching=True)
    submit_many(e)
    for _ in range(5):
        e.step()
    e.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    e.step()
    assert e.scheduler.reset_prefix_cache(reset_running_requests=True)
    e.check_ledger()
    assert e.num_free_blocks == 29
    e.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert e.finish() == {"stop": 24}


# --- sessions that stream their input -----------------------------------------------------------------


SESSION = RequestOptions(session=True)


@pytest.fixture
def engine_with_sessions():
    def make(**options):
        return CheckedEngine(BatchJobAwareScheduler, EngineOptions(**options))

    return make


def test_a_session_waits_for_its_turns_and_holds_nobody_up(engine_with_sessions):
    e = engine_with_sessions(num_blocks=20, max_num_seqs=4)
    e.submit("session", 20, 5, options=SESSION)
    for turn in range(3):
        names = [e.submit(f"{turn}-{number}", 20, 5).request_id for number in range(3)]
        while not (
            e.outcomes.keys() >= set(names)
            and e.requests["session"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
        ):
            assert e.step()
        e.submit("session", 10, 5, options=SESSION)
    while e.requests["session"].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        assert e.step()
    e.end_session("session")
    e.run()
    e.check_integrity()
    # Four turns of five tokens, each with its own end.
    assert len(e.outcomes["session"].tokens) == 20


def test_a_session_that_outgrows_the_pool_ends_with_an_error_and_the_others_go_on(engine_with_sessions):
    e = engine_with_sessions(num_blocks=9)
    e.submit("session", 20, 5, options=SESSION)
    while e.requests["session"].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        e.step()
    e.submit("session", 9 * BLOCK, 5, options=SESSION)
    e.submit("plain", 20, 5)
    e.run()
    e.check_integrity()
    assert e.outcomes["session"].finish_reason == "error"
    assert e.outcomes["plain"].finish_reason == "stop"


# --- the end ------------------------------------------------------------------------------------------


def test_shutdown_with_requests_waiting(connected, monkeypatch, tmp_path):
    """The engine's own shutdown happens, and what has ended since the last report is told."""
    path = tmp_path / "report.json"
    monkeypatch.setenv("BATCHJOB_REPORT", str(path))
    e = connected(max_num_seqs=1)
    submit_many(e)
    while not e.outcomes:
        e.step()
    assert not path.exists()
    closed = []
    monkeypatch.setattr(e.scheduler.connector, "shutdown", lambda: closed.append(True))
    e.scheduler.shutdown()
    assert closed == [True]
    jobs = json.loads(path.read_text(encoding="utf-8"))["jobs"]
    assert sum(job["requests"] for job in jobs) == 24
    assert sum(job["finished"] for job in jobs) == len(e.outcomes)
    e.check_ledger()


def test_all_are_aborted_in_whatever_state_they_are(connected):
    e = connected(FULL_TILT, num_blocks=20, max_num_seqs=6, max_num_batched_tokens=64)
    e.submit("structured", 40, 5, options=RequestOptions(structured=True))
    e.submit("loading", 3 * BLOCK, 5, options=loading(tokens=3 * BLOCK, is_async=True))
    e.submit("deferred", 40, 5, options=loading(tokens=32, defers=100))
    submit_many(e)
    while not e.num_preemptions:
        e.step()
    assert {request.status.name for request in e.requests.values()} >= {
        "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
        "WAITING_FOR_REMOTE_KVS",
        "WAITING",
        "RUNNING",
        "PREEMPTED",
    }
    for name in list(e.requests):
        e.abort(name)
    e.check_ledger()
    assert len(e.scheduler.waiting) == 0
    e.run()
    e.check_integrity()

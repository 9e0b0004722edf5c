"""What the fake engine core says for itself; that it decides as vLLM does is tested beside vLLM."""

from __future__ import annotations

import re

import pytest

from batchjob_testkit.engines import EngineLimits, NoProgressError
from batchjob_testkit.fakes import FakeEngineCore, FCFSQueue

BLOCK = 16


def test_a_batch_of_a_thousand_requests_is_answered_in_full():
    core = FakeEngineCore(limits=EngineLimits(num_blocks=501, max_num_seqs=128))
    lengths = {f"{number:04}": 1 + number * 23 % 120 for number in range(1000)}
    for number, (name, decode) in enumerate(lengths.items()):
        core.submit(name, 1 + number * 37 % 300, decode)
    core.run()
    assert core.num_preemptions > 0
    assert {name: len(outcome.tokens) for name, outcome in core.outcomes.items()} == lengths
    core.engine.kv_cache_manager.check_integrity()


def test_the_blocks_used_are_those_held_while_a_step_computes():
    core = FakeEngineCore()
    core.submit("a", BLOCK, 3)
    core.submit("b", BLOCK - 1, 2)
    core.run()
    # "a" opens its second block with its second token; "b" ends in the second step.
    assert core.used_blocks == [2, 3, 2]
    assert core.num_free_blocks == core.limits.usable_blocks


def test_no_progress_is_an_error_that_shows_the_state():
    core = FakeEngineCore(limits=EngineLimits(num_blocks=5))
    core.submit("giant", 5 * BLOCK, 1)
    core.submit("behind", BLOCK, 1)
    with pytest.raises(NoProgressError) as error:
        core.run()
    assert str(error.value) == (
        "after 21 steps: running [], waiting ['giant (80 tokens)', 'behind (16 tokens)'], "
        "in neither [], 4 of 4 blocks free"
    )


def test_a_batch_that_takes_too_long_is_an_error_that_shows_the_state():
    core = FakeEngineCore()
    core.submit("long", BLOCK, 1000)
    with pytest.raises(NoProgressError, match=r"after 5 steps: running \['long \(20 of 21 tokens computed\)"):
        core.run(max_steps=5)


def test_a_queue_hears_of_each_end_once_and_whether_it_came_by_itself():
    ends = []

    class Listener(FCFSQueue):
        def end(self, request_id, *, by_itself):
            ends.append((request_id, by_itself))

    core = FakeEngineCore(Listener)
    core.submit("stopped", BLOCK, 3)
    core.submit("capped", BLOCK, 5, max_tokens=2)
    core.submit("aborted", BLOCK, 9)
    core.step()
    core.abort("aborted")
    assert ends == [], "ends are told between the steps"
    core.run()
    assert ends == [("aborted", False), ("capped", True), ("stopped", True)]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((0, 1), "prompt_tokens of 'r': got 0, allowed: at least 1"),
        ((1, 0), "decode_tokens of 'r': got 0, allowed: at least 1"),
        ((1, 1, 0), "max_tokens of 'r': got 0, allowed: at least 1"),
        (
            (60, 5),
            "prompt_tokens + max_tokens of 'r': got 60 + 5, allowed: at most max_model_len=64",
        ),
    ],
)
def test_impossible_lengths_are_refused(lengths, message):
    core = FakeEngineCore(limits=EngineLimits(max_model_len=64))
    prompt, decode, *cap = lengths
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        core.submit("r", prompt, decode, max_tokens=cap[0] if cap else None)
    assert len(core.queue) == 0


def test_an_id_that_is_taken_is_refused():
    core = FakeEngineCore()
    core.submit("r", 1, 1)
    with pytest.raises(ValueError, match="request_id: got 'r', allowed: one that is not taken"):
        core.submit("r", 1, 1)

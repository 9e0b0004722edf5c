"""How many tokens a step computes: prefill rides along with decoding for as long as that lasts.

A decode step reads all weights for a few tokens each, and what prefill rides along costs little; a step of
prefill alone stalls every decode behind it. So what is left to prefill is spread over the steps that are
left. No device is known here: it follows from what waits and runs alone, and so does every choice (Q5).
"""

from __future__ import annotations

from typing import Final

from batchjob_scheduler.engine_view import EngineView
from batchjob_scheduler.forecast import Forecast
from batchjob_scheduler.queue import BatchJobQueue

MIN_PREFILL_TOKENS: Final = 32
"""What a step may prefill beside its decodes, however little is left."""

_MORE_THAN_EVEN: Final = 1.1
"""Above the even share, since what is spread too thin ends too late."""

_STEPS_TO_FILL: Final = 64
"""Free slots and blocks are filled with critical work in about so many steps."""

_STEPS_TO_FILL_SLOTS: Final = 4
"""The same where slots are what is short and decoding is much of the work: an empty slot is lost there."""

_MOSTLY_PREFILL: Final = 4
"""So many tokens to prefill for each one to decode make an empty slot cost nothing."""


def step_tokens(queue: BatchJobQueue, engine: EngineView, tokens_per_decode: int = 1) -> int:
    """The budget of the step that comes now, in tokens: at most the engine's own.

    What runs always has its tokens, ``tokens_per_decode`` each: 1, and more with draft tokens.
    """
    limit, running = engine.step_tokens, len(engine.running())
    if not running or not len(queue):
        return limit
    left = queue.forecast()
    even = _MORE_THAN_EVEN * (left.prefill_tokens + left.decode_tokens) / left.steps
    at_least = running * tokens_per_decode + max(MIN_PREFILL_TOKENS, engine.block_size)
    return min(limit, max(at_least, int(even + _filling_tokens(left, engine))))


def _filling_tokens(left: Forecast, engine: EngineView) -> float:
    """What critical work has to compute in this step, to fill the free slots or the free blocks soon."""
    waiting, waiting_tokens = left.critical_waiting
    if not waiting:
        return 0.0
    prompt = waiting_tokens / waiting
    slots = engine.max_running - len(engine.running())
    room = engine.free_blocks() * engine.block_size / max(left.tokens_held, prompt)
    if waiting <= min(slots, room):
        # Nothing is left to ride along with later steps, and a delay of any may be one of the batch.
        return waiting_tokens
    slots_are_short = left.concurrency > engine.max_running - 1
    decoding_counts = left.prefill_tokens < _MOSTLY_PREFILL * left.decode_tokens
    steps = _STEPS_TO_FILL_SLOTS if slots_are_short and decoding_counts else _STEPS_TO_FILL
    return max(0.0, min(slots, waiting, room) * prompt / steps)

"""How many tokens a step computes: prefill rides along with decoding for as long as that lasts.

A decode step reads all weights for a few tokens each, and what prefill rides along costs little; a step of
prefill alone stalls every decode behind it. So what is left to prefill is spread over the steps that are
left. No device is known here: it follows from what waits and runs alone, and so does every choice (Q5).
"""

from __future__ import annotations

from typing import Final

from batchjob_scheduler.engine_view import EngineView
from batchjob_scheduler.forecast import FULL_STEP_TOKENS, Forecast
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

_LESS_THAN_EVEN: Final = 0.9
"""Below this share of the even one, prefill would be left over at the end."""

_FREE_TOKENS: Final = 200
_CONTEXT_OF_A_FREE_TOKEN: Final = 600
"""About what a step computes while it reads the weights, and of how much context while it computes one more.

An accelerator of today computes 150 to 300 operations for each byte that it reads, and a model of some
billion parameters keeps 50 to 150 KB a token in the KV cache.
"""

_MOST_WHILE_UNKNOWN: Final = 1.5
"""Of what a step computes for nothing, while the even share is a guess and the engine is full anyway."""

_ANSWER_TOKENS_PER_STALLED_STEP: Final = 10
"""Where prefill is too much to ride along, decodes may stall, to start the last of a blended batch at once:
for one whole step of prefill for each so many tokens of an answer.
"""


def step_tokens(queue: BatchJobQueue, engine: EngineView, tokens_per_decode: int = 1) -> int:
    """The budget of the step that comes now, in tokens: at most the engine's own.

    What runs always has its tokens, ``tokens_per_decode`` each: 1, and more with draft tokens.
    """
    limit, running = engine.step_tokens, len(engine.running())
    if not running or not len(queue):
        return limit
    decodes = running * tokens_per_decode
    # Up to a full step prefill costs nothing, and a slot that is filled later decodes nothing meanwhile.
    at_least = max(FULL_STEP_TOKENS, decodes + MIN_PREFILL_TOKENS, decodes + engine.block_size)
    left = queue.forecast()
    shaped = _blended_tokens(left, engine) if queue.blends else _shaped_tokens(left, engine)
    return min(limit, max(at_least, int(shaped)))


def _shaped_tokens(left: Forecast, engine: EngineView) -> float:
    """The even share and, while critical work waits, what fills the free slots and blocks soon."""
    if left.all_critical_fits(engine):
        # Nothing is left to ride along with later steps, and a delay of any may be one of the batch.
        return _MORE_THAN_EVEN * _even_tokens(left) + left.critical_waiting[1]
    steps = _STEPS_TO_FILL_SLOTS if _empty_slots_cost(left, engine) else _STEPS_TO_FILL
    return _MORE_THAN_EVEN * _even_tokens(left) + _fitting_tokens(left, engine) / steps


def _blended_tokens(left: Forecast, engine: EngineView) -> float:
    """About what the step computes for nothing, and not far from the even share.

    Blend takes short prompts and long ones as they are spread (O5c), so there is some to ride along always.
    """
    shaped, even = _shaped_tokens(left, engine), _even_tokens(left)
    context = sum(request.num_computed_tokens for request in engine.running())
    free = _FREE_TOKENS + context / _CONTEXT_OF_A_FREE_TOKEN
    if left.all_critical_fits(engine):
        most_at_once = left.mean_decode_tokens / _ANSWER_TOKENS_PER_STALLED_STEP * engine.step_tokens
        if even > free and left.critical_waiting[1] <= most_at_once:
            return shaped
    elif not left.is_known:
        even = min(even, _MOST_WHILE_UNKNOWN * free)
    filling = _fitting_tokens(left, engine) / _STEPS_TO_FILL_SLOTS if _empty_slots_cost(left, engine) else 0.0
    return min(shaped, max(free, _LESS_THAN_EVEN * even) + filling)


def _even_tokens(left: Forecast) -> float:
    return (left.prefill_tokens + left.decode_tokens) / left.steps


def _fitting_tokens(left: Forecast, engine: EngineView) -> float:
    """What critical work has to prefill to fill the free slots, or the free blocks."""
    waiting, waiting_tokens = left.critical_waiting
    if not waiting:
        return 0.0
    return max(0.0, min(waiting, left.fitting_requests(engine))) * (waiting_tokens / waiting)


def _empty_slots_cost(left: Forecast, engine: EngineView) -> bool:
    """Whether slots are what is short, and decoding is much of the work."""
    decoding_counts = left.prefill_tokens < _MOSTLY_PREFILL * left.decode_tokens
    return decoding_counts and left.concurrency > engine.max_running - 1

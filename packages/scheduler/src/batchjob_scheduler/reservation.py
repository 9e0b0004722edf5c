"""The KV cache that is kept for what runs, and the peak that it is heading for (rules V1 to V5)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Final

from batchjob_scheduler.engine_view import EngineView, Request
from batchjob_scheduler.estimator import remaining_tokens

LOOK_AHEAD_TOKENS: Final = 256
"""How far ahead the peak is predicted, in tokens of each request."""


def blocks_for(tokens: int, block_size: int) -> int:
    """The whole blocks that ``tokens`` tokens occupy."""
    return (tokens + block_size - 1) // block_size


def known_tokens(request: Request) -> int:
    """Prompt and output so far, with the output that is still computed."""
    return request.num_tokens + request.num_output_placeholders


def within_look_ahead(end: int, known: int) -> int:
    """What a request still decodes of those tokens with which it ends, as far as is looked ahead (E5, V5)."""
    remaining = remaining_tokens(end, known)
    return min(LOOK_AHEAD_TOKENS, remaining)


def charged_tokens(need: int, shared: int) -> int:
    """What must be free for a request of that need: less what it shares, and at least one token (V4)."""
    return max(min(need, 1), need - shared)


def next_step_blocks(known: int, computed: int, engine: EngineView) -> int:
    """The blocks that a running request of so many tokens adds in the step after the current one (V1)."""
    limit, size = engine.step_tokens, engine.block_size
    if known <= computed + limit:
        # It has caught up then and computes one new token, which needs a block if the last is full.
        return 0 if (known + engine.lookahead_tokens) % size else 1
    slots = computed + limit + engine.lookahead_tokens
    next_chunk = min(known - computed - limit, limit)
    return blocks_for(slots + next_chunk, size) - blocks_for(slots, size)


def attainable_tokens(free_blocks: int, held_by_running: int, block_size: int) -> int:
    """The tokens that the running requests and a new one may hold together (V5).

    What the running requests hold and what is free, less a twentieth, since predictions err. A prefix
    that requests share is counted for each of them, here and in the peak; what somebody else holds is
    not counted.
    """
    return (free_blocks + held_by_running) * block_size * 19 // 20


class PredictedPeak:
    """What the running requests are predicted to hold together as they end one after the other (V5).

    >>> peak = PredictedPeak()
    >>> peak.add(held=[100], remaining=[10])
    >>> peak.beside(4), peak.beside(30)   # 100 + 2 * 4 when it ends first, 100 + 2 * 10 before it does
    (108, 120)
    """

    def __init__(self) -> None:
        # Of the requests that end after so many tokens each: what they hold now, and how many they are.
        self._held = [0] * (LOOK_AHEAD_TOKENS + 1)
        self._ending = [0] * (LOOK_AHEAD_TOKENS + 1)
        # What they and one more hold when each has decoded so many tokens.
        self._together: list[int] = []

    def add(self, held: Iterable[int], remaining: Iterable[int]) -> None:
        """More requests run: what each holds, and what it decodes, which is one token at least (E5)."""
        # As within_look_ahead says: a call for every running request in each step adds up.
        for tokens, left in zip(held, remaining, strict=True):
            end = LOOK_AHEAD_TOKENS if left > LOOK_AHEAD_TOKENS else left if left > 0 else 1
            self._held[end] += tokens
            self._ending[end] += 1
        self._together.clear()

    def beside(self, remaining: int) -> int:
        """The peak until one more request with so many remaining tokens ends, without what it holds now."""
        if not self._together:
            self._add_up()
        return max(self._together[: remaining + 1])

    def _add_up(self) -> None:
        held, there = sum(self._held), sum(self._ending)
        freed_before = accumulate(self._held, initial=0)
        ended_before = accumulate(self._ending, initial=0)
        tokens = range(LOOK_AHEAD_TOKENS + 1)
        self._together = [
            held - freed + (there - ended + 1) * each
            for each, freed, ended in zip(tokens, freed_before, ended_before, strict=False)
        ]

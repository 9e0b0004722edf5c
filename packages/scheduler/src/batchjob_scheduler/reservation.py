"""The KV cache that is kept for what runs, and the peak that it is heading for (rules V1 to V5)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from itertools import count as count_from
from typing import Final

from batchjob_scheduler.config import BatchJobConfig
from batchjob_scheduler.engine_view import EngineView, Request

LOOK_AHEAD_TOKENS: Final = 256
"""How far ahead the peak is predicted, in tokens of each request."""


def blocks_for(tokens: int, block_size: int) -> int:
    """The whole blocks that ``tokens`` tokens occupy."""
    return (tokens + block_size - 1) // block_size


def next_step_blocks(request: Request, engine: EngineView) -> int:
    """The blocks that a running request adds in the step after the current one (V1)."""
    limit, size = engine.step_tokens, engine.block_size
    known = request.num_tokens + request.num_output_placeholders
    computed = request.num_computed_tokens
    computed += min(known - computed, limit)
    left = known - computed
    slots = computed + engine.lookahead_tokens
    # A request that has caught up has one new token to compute, a chunked prefill its next chunk.
    return blocks_for(slots + (min(left, limit) if left else 1), size) - blocks_for(slots, size)


def budget_blocks(engine: EngineView, config: BatchJobConfig) -> int:
    """The blocks that new work may take: the free ones less the reserve (V2, V3)."""
    free, limit = engine.free_blocks(), config.reserve_max_blocks
    reserve = config.reserve_margin_blocks
    for request in engine.running():
        if reserve >= limit:
            break
        reserve += next_step_blocks(request, engine)
    return max(0, free - min(reserve, limit))


def attainable_tokens(engine: EngineView) -> int:
    """The tokens that the running requests and a new one may hold together (V5).

    What the running requests hold and what is free, less a twentieth, since predictions err. A prefix
    that requests share is counted for each of them, here and in the peak; what somebody else holds is
    not counted.
    """
    size, limit = engine.block_size, engine.step_tokens
    blocks = engine.free_blocks()
    for request in engine.running():
        known = request.num_tokens + request.num_output_placeholders
        blocks += blocks_for(min(known, request.num_computed_tokens + limit), size)
    return blocks * size * 19 // 20


class PredictedPeak:
    """What the running requests are predicted to hold together as they end one after the other (V5).

    >>> peak = PredictedPeak([(100, 10)])
    >>> peak.beside(4), peak.beside(30)   # 100 + 2 * 4 when it ends first, 100 + 2 * 10 before it does
    (108, 120)
    """

    def __init__(self, members: Iterable[tuple[int, int]]) -> None:
        """``members`` are pairs of held and remaining tokens."""
        longest_first = sorted(members, key=_by_remaining, reverse=True)
        self._negative_remaining = [-remaining for _, remaining in longest_first]
        self._held_before = [0, *accumulate(held for held, _ in longest_first)]
        # What they hold at each end, were one more request there that has just begun to hold tokens.
        at_ends = [
            together + (count + 1) * remaining
            for count, together, (_, remaining) in zip(
                count_from(1), self._held_before[1:], longest_first, strict=False
            )
        ]
        self._most_from = [0, *accumulate(reversed(at_ends), max)][::-1]

    def beside(self, remaining: int) -> int:
        """The peak until one more request with so many remaining tokens ends, without what it holds now."""
        longer = bisect_left(self._negative_remaining, -remaining)
        at_its_end = self._held_before[longer] + (longer + 1) * remaining
        return max(at_its_end, self._most_from[longer])


def _by_remaining(member: tuple[int, int]) -> int:
    return member[1]

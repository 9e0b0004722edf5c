"""The KV cache that is kept for what runs, and the peak that it is heading for (rules V1 to V5)."""

from __future__ import annotations

from collections.abc import Iterable

from batchjob_scheduler.config import BatchJobConfig
from batchjob_scheduler.engine_view import EngineView, Request


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


class PredictedPeak:
    """The most tokens that the running requests are predicted to hold together (V5).

    >>> peak = PredictedPeak([(100, 10)])
    >>> peak.with_candidate(50, 4)
    158
    """

    def __init__(self, members: Iterable[tuple[int, int]]) -> None:
        """``members`` are pairs of held and remaining tokens."""
        self._longest_first = sorted(members, key=lambda member: -member[1])

    def with_candidate(self, held: int, remaining: int) -> int:
        """The peak if one more request joins."""
        peak = together = count = 0
        joined = False
        for other_held, other_remaining in self._longest_first:
            if not joined and other_remaining <= remaining:
                joined = True
                count += 1
                together += held
                peak = max(peak, together + count * remaining)
            count += 1
            together += other_held
            peak = max(peak, together + count * other_remaining)
        if not joined:
            peak = max(peak, together + held + (count + 1) * remaining)
        return peak

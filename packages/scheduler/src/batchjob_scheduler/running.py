"""What the running requests hold and will need. Within a step of the engine each is looked at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import sub

from batchjob_scheduler.config import BatchJobConfig
from batchjob_scheduler.engine_view import EngineView, Request
from batchjob_scheduler.reservation import (
    PredictedPeak,
    attainable_tokens,
    blocks_for,
    next_step_blocks,
)


class Running:
    """The running requests as the reservation counts them (V1 to V5).

    Between :meth:`begin_step` and :meth:`end_step` what runs computes nothing, so what was looked at
    stays as it is, and only a request that started since is new. Otherwise everything is looked at anew.
    """

    def __init__(self, engine: EngineView, config: BatchJobConfig, end_of: Callable[[Request], int]) -> None:
        """``end_of`` predicts with how many tokens a running request ends."""
        self._engine = engine
        self._margin = config.reserve_margin_blocks
        self._limit = config.reserve_max_blocks
        self._end_of = end_of
        self.in_step = False
        """Whether the engine is deciding on a step."""
        self._counted: list[Request] = []
        self._known: list[int] = []
        self._blocks: list[int] = []

    def begin_step(self) -> None:
        """The engine decides on a step: until it has, nothing is computed."""
        self.in_step = True
        self._counted = []

    def end_step(self) -> None:
        """What runs may compute now."""
        self.in_step = False

    def look(self) -> None:
        """See what runs now; the properties hold from then on."""
        running, counted = self._engine.running(), self._counted
        kept = self.in_step and counted and len(running) >= len(counted)
        if not kept or running[len(counted) - 1] is not counted[-1]:
            self._counted, self._known, self._blocks = [], [], []
            self.reserve_blocks = min(self._margin, self._limit)
            """V2"""
            self.held_blocks = 0
            """What they hold together once this step is computed."""
            self._in_peak = 0
            self._peak = PredictedPeak()
        self._count(running[len(self._counted) :])

    def budget_blocks(self) -> int:
        """The blocks that new work may take (V3)."""
        return max(0, self._engine.free_blocks() - self.reserve_blocks)

    def attainable_tokens(self) -> int:
        """What they and a new one may hold together (V5)."""
        return attainable_tokens(self._engine.free_blocks(), self.held_blocks, self._engine.block_size)

    def room_tokens(self, remaining: int, enough: int) -> int:
        """What one more request may need that decodes so many tokens (V5), or ``enough`` or more of it."""
        size, attainable = self._engine.block_size, self.attainable_tokens()
        # When each of them ends need only be known if it is not enough that none ends before the new one.
        at_most = self._known_blocks * size + (len(self._counted) + 1) * remaining
        room = (attainable - at_most) // size * size
        return room if room >= enough else (attainable - self._peak_beside(remaining)) // size * size

    def _peak_beside(self, remaining: int) -> int:
        first, self._in_peak = self._in_peak, len(self._counted)
        if first < self._in_peak:
            size = self._engine.block_size
            held = (blocks * size for blocks in self._blocks[first:])
            self._peak.add(held, map(sub, map(self._end_of, self._counted[first:]), self._known[first:]))
        return self._peak.beside(remaining)

    def _count(self, requests: Sequence[Request]) -> None:
        engine, size, step_tokens = self._engine, self._engine.block_size, self._engine.step_tokens
        held_blocks = reserve = 0
        for request in requests:
            # As known_tokens and blocks_for say: calls for every running request in each step add up.
            known = request.num_tokens + request.num_output_placeholders
            blocks = -(-known // size)
            computed = request.num_computed_tokens
            self._known.append(known)
            self._blocks.append(blocks)
            after_this_step = computed + step_tokens
            held_blocks += blocks if known <= after_this_step else blocks_for(after_this_step, size)
            if reserve < self._limit:
                reserve += next_step_blocks(known, computed, engine)
        self._known_blocks = sum(self._blocks)
        self.held_blocks += held_blocks
        self.reserve_blocks = min(self.reserve_blocks + reserve, self._limit)
        self._counted += requests

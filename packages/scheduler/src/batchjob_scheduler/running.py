"""What the running requests hold and will need. Within a step of the engine each is looked at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from batchjob_scheduler.config import BatchJobConfig
from batchjob_scheduler.engine_view import EngineView, Request
from batchjob_scheduler.reservation import PredictedPeak, blocks_for, next_step_blocks


class Running:
    """The running requests as the reservation counts them (V1 to V5).

    Between :meth:`begin_step` and :meth:`end_step` what runs computes nothing, so what was looked at
    stays as it is, and only a request that started since is new. Otherwise everything is looked at anew.
    """

    def __init__(
        self, engine: EngineView, config: BatchJobConfig, remaining: Callable[[Request], int]
    ) -> None:
        """``remaining`` predicts the tokens that a running request still decodes, within the look-ahead."""
        self._engine = engine
        self._margin = config.reserve_margin_blocks
        self._limit = config.reserve_max_blocks
        self._remaining = remaining
        self.in_step = False
        """Whether the engine is deciding on a step."""
        self._counted: list[Request] = []

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
            self._counted = counted = []
            self.reserve_blocks = min(self._margin, self._limit)
            """V2"""
            self.held_blocks = 0
            """What they hold together once this step is computed."""
            self.peak = PredictedPeak(self._count(running))
            """V5"""
        for held, remaining in self._count(running[len(counted) :]):
            self.peak.add(held, remaining)

    def budget_blocks(self) -> int:
        """The blocks that new work may take (V3)."""
        return max(0, self._engine.free_blocks() - self.reserve_blocks)

    def _count(self, requests: Sequence[Request]) -> list[tuple[int, int]]:
        """Count requests in; returns what the peak needs of each, held and remaining tokens."""
        engine, size, step_tokens = self._engine, self._engine.block_size, self._engine.step_tokens
        members = []
        for request in requests:
            known = request.num_tokens + request.num_output_placeholders
            blocks = blocks_for(known, size)
            members.append((blocks * size, self._remaining(request)))
            after_this_step = request.num_computed_tokens + step_tokens
            self.held_blocks += blocks if known <= after_this_step else blocks_for(after_this_step, size)
            if self.reserve_blocks < self._limit:
                needed = self.reserve_blocks + next_step_blocks(request, engine)
                self.reserve_blocks = min(needed, self._limit)
        self._counted += requests
        return members

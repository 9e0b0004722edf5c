"""What a reservation under test looks like, and the specification in that shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from batchjob_spec import reservation
from batchjob_spec.queue import Settings
from batchjob_testkit.fakes import FakeEngine, FakeRequest

HeldAndRemaining = tuple[int, int]
"""The tokens that a request holds in the KV cache, and those that it is predicted to decode yet."""


class Reservation(Protocol):
    """Says what part of an engine's KV cache new work may take."""

    def next_step_blocks(self, request: Any) -> int:
        """The blocks that a running request adds in the step after the current one (V1)."""

    def budget_tokens(self) -> int:
        """The tokens that new work may take now (V2, V3)."""

    def predicted_peak_tokens(self, running: Sequence[HeldAndRemaining], candidate: HeldAndRemaining) -> int:
        """The most that they are predicted to hold together until the candidate has ended (V5)."""


ReservationFactory = Callable[[FakeEngine, Settings], Reservation]
"""Makes a reservation over an engine."""


class SpecReservation:
    """The specification as a reservation."""

    def __init__(self, engine: FakeEngine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings

    def next_step_blocks(self, request: FakeRequest) -> int:
        """V1."""
        return reservation.next_step_blocks(
            request.num_computed_tokens,
            request.num_tokens,
            self.engine.step_tokens,
            self.engine.lookahead_tokens,
            self.engine.block_size,
        )

    def budget_tokens(self) -> int:
        """V2 and V3."""
        running_blocks = sum(map(self.next_step_blocks, self.engine.running()))
        margin, limit = self.settings.reserve_margin_blocks, self.settings.reserve_max_blocks
        reserved = reservation.reserve_blocks(running_blocks, margin, limit)
        return reservation.budget_tokens(self.engine.free_blocks(), reserved, self.engine.block_size)

    def predicted_peak_tokens(self, running: Sequence[HeldAndRemaining], candidate: HeldAndRemaining) -> int:
        """V5."""
        return reservation.predicted_peak_tokens(running, candidate)

"""What an estimator under test looks like, and the specification in that shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from batchjob_spec import estimator


class Estimator(Protocol):
    """Learns how long the requests of one job decode; all lengths are in tokens."""

    def observe(self, decoded_tokens: int) -> None:
        """A request of the job ended by itself after so many tokens."""

    def predicted_tokens(self) -> int:
        """How long a request of the job is predicted to decode (E1, E2)."""

    def remaining_tokens(self, output_tokens: int, min_tokens: int, max_tokens: int) -> int:
        """How much longer a request with these limits is predicted to decode (E4, E5)."""


EstimatorFactory = Callable[[float], Estimator]
"""Makes an estimator that has observed nothing, from the weight of the newest observation."""


class SpecEstimator:
    """The specification as an estimator."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.estimate = estimator.Estimate()

    def observe(self, decoded_tokens: int) -> None:
        """E2."""
        self.estimate = estimator.observe(self.estimate, decoded_tokens, self.alpha)

    def predicted_tokens(self) -> int:
        """E1 and E2."""
        return estimator.predicted_tokens(self.estimate)

    def remaining_tokens(self, output_tokens: int, min_tokens: int, max_tokens: int) -> int:
        """E4 and E5."""
        predicted = estimator.held_between(self.predicted_tokens(), min_tokens, max_tokens)
        return estimator.remaining_tokens(predicted, output_tokens)

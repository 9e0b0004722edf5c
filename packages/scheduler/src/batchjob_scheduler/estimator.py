"""How long the requests of a job decode (rules E1 to E5)."""

from __future__ import annotations

from typing import Final

COLD_START_TOKENS: Final = 128

_DEVIATIONS: Final = 3.5
"""How far beyond the average long requests reach, in mean absolute deviations."""


class DecodeLengthEstimator:
    """An exponentially weighted moving average of decode lengths, in tokens.

    >>> estimator = DecodeLengthEstimator(alpha=0.1)
    >>> estimator.predicted_tokens
    128
    >>> estimator.observe(10); estimator.observe(110); estimator.predicted_tokens
    20
    """

    __slots__ = (
        "_alpha",
        "_average_tokens",
        "_deviation_tokens",
        "observations",
        "predicted_tokens",
        "total_tokens",
    )

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._average_tokens = float(COLD_START_TOKENS)
        self._deviation_tokens = 0.0
        self.observations = 0
        self.total_tokens = 0
        self.predicted_tokens = COLD_START_TOKENS

    def observe(self, decoded_tokens: int) -> None:
        """Learn from a request that ended by itself after ``decoded_tokens`` tokens."""
        if self.observations == 0:
            self._average_tokens = float(decoded_tokens)
        else:
            weight = self._alpha
            deviation = abs(decoded_tokens - self._average_tokens)
            self._deviation_tokens = weight * deviation + (1 - weight) * self._deviation_tokens
            self._average_tokens = weight * decoded_tokens + (1 - weight) * self._average_tokens
        self.observations += 1
        self.total_tokens += decoded_tokens
        self.predicted_tokens = int(self._average_tokens)

    @property
    def long_tokens(self) -> int:
        """What few requests of the job decode more than, from the average and the deviation."""
        return int(self._average_tokens + _DEVIATIONS * self._deviation_tokens)


def held_between(predicted: int, min_tokens: int, max_tokens: int) -> int:
    """What a job's prediction says of one request with limits of its own (E4).

    >>> held_between(128, 0, 16), held_between(0, 0, 16), held_between(8, 12, 16)
    (16, 1, 12)
    """
    return min(max(predicted, min_tokens, 1), max_tokens)


def remaining_tokens(total: int, output: int) -> int:
    """What a request that is predicted to decode ``total`` tokens still does: at least one (E5).

    >>> remaining_tokens(128, output=28), remaining_tokens(128, output=200)
    (100, 1)
    """
    return total - output if total > output else 1

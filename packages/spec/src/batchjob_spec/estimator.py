"""Rules E1 to E5: how long the requests of a job decode, learnt while the job runs.

Requests of one job share a prompt template and a task, so their decode lengths resemble each other.
That is the one thing that a batch scheduler knows and the engine does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

COLD_START_TOKENS = 128
"""E1: the predicted decode length, in tokens, of a job that has not been observed."""

DEFAULT_ALPHA = 0.1
"""E2: the weight of the newest observation."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known of a job's decode length: an average in tokens over ``observations`` requests."""

    observations: int = 0
    tokens: float = float(COLD_START_TOKENS)


def observe(estimate: Estimate, decoded_tokens: int, alpha: float = DEFAULT_ALPHA) -> Estimate:
    """E2: the first observation is the estimate, each later one moves it by the share ``alpha``.

    The average never freezes, because a job's requests need not be shuffled: what ends first is short.
    This is the exact formula, in the floats that production computes with. Rounding keeps it from being
    proved; :func:`moved` is the same step in whole numbers, and proved.

    >>> observe(observe(Estimate(), 10), 110)
    Estimate(observations=2, tokens=20.0)

    pre: estimate.observations >= 0
    pre: 0 <= estimate.tokens < 2**53
    pre: 0 <= decoded_tokens < 2**53
    pre: 0 < alpha <= 1
    post: __return__.observations == estimate.observations + 1
    post: estimate.observations > 0 or __return__.tokens == decoded_tokens
    """
    if estimate.observations == 0:
        tokens = float(decoded_tokens)
    else:
        tokens = alpha * decoded_tokens + (1 - alpha) * estimate.tokens
    return Estimate(estimate.observations + 1, tokens)


def moved(average: int, observation: int, weight_numerator: int, weight_denominator: int) -> int:
    """E2 in whole numbers: the average moved towards the observation by the share of the weight.

    It ends between the two and never moves the wrong way; under a weight of 1, which the first
    observation has, it is the observation. Rounded down, it is less than one unit below the exact
    average. The unit is free: in units of ``2**-k`` tokens, :func:`observe` stays within
    ``2**-k / alpha`` tokens of it over any number of observations, besides its own rounding.

    >>> moved(10, 110, 1, 10), moved(128, 10, 1, 1)
    (20, 10)

    pre: 0 < weight_numerator <= weight_denominator
    post: min(average, observation) <= __return__ <= max(average, observation)
    post: weight_numerator < weight_denominator or __return__ == observation
    post: 0 <= (observation - average) * weight_numerator - (__return__ - average) * weight_denominator
    post: (observation - average) * weight_numerator < (__return__ + 1 - average) * weight_denominator
    """
    return average + (observation - average) * weight_numerator // weight_denominator


def predicted_tokens(estimate: Estimate) -> int:
    """E1 and E4: a job's predicted decode length in tokens, its estimate rounded down.

    >>> predicted_tokens(Estimate()), predicted_tokens(Estimate(2, 20.9))
    (128, 20)

    pre: 0 <= estimate.tokens < 2**53
    post: __return__ <= estimate.tokens < __return__ + 1
    """
    return floor(estimate.tokens)


def held_between(predicted: int, min_tokens: int, max_tokens: int) -> int:
    """E4: the prediction for one request lies between ``max(1, min_tokens)`` and ``max_tokens``.

    The engine lets no request end outside them, whatever its job usually does.

    >>> held_between(128, 0, 16), held_between(0, 0, 16), held_between(5, 8, 16)
    (16, 1, 8)

    pre: min_tokens >= 0
    pre: max_tokens >= max(1, min_tokens)
    post: 1 <= __return__ and min_tokens <= __return__ <= max_tokens
    post: __return__ in (predicted, 1, min_tokens, max_tokens)
    """
    at_least = max(1, min_tokens)
    return max(at_least, min(predicted, max_tokens))


def remaining_tokens(predicted: int, output_tokens: int) -> int:
    """E5: what a running request is still predicted to decode, at least one token.

    One that has outlived its prediction has not ended, so it goes on for at least one more step.

    >>> remaining_tokens(128, 28), remaining_tokens(128, 500)
    (100, 1)

    pre: output_tokens >= 0
    post: __return__ >= 1
    post: __return__ == predicted - output_tokens or predicted - output_tokens < 1
    """
    return max(1, predicted - output_tokens)

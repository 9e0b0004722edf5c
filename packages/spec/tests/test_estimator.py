"""Rule E2: the average as production computes it, in floats, against the same step in whole numbers."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from batchjob_spec.estimator import Estimate, moved, observe

LONGEST = 1_000_000
UNITS_PER_TOKEN = 2**20
LENGTHS = st.lists(st.integers(0, LONGEST), min_size=1, max_size=50)
ALPHAS = st.floats(1e-3, 1)


@given(LENGTHS, ALPHAS)
def test_e2_floats_stay_within_the_stated_distance_of_whole_numbers(lengths, alpha):
    weight, whole = alpha.as_integer_ratio()
    estimate, units = observe(Estimate(), lengths[0], alpha), lengths[0] * UNITS_PER_TOKEN
    for length in lengths[1:]:
        estimate = observe(estimate, length, alpha)
        units = moved(units, length * UNITS_PER_TOKEN, weight, whole)
    rounded_down = Fraction(1, UNITS_PER_TOKEN) / Fraction(alpha)
    float_rounding = Fraction(4 * LONGEST, 2**53) / Fraction(alpha)
    ahead = Fraction(estimate.tokens) - Fraction(units, UNITS_PER_TOKEN)
    assert -float_rounding <= ahead <= rounded_down + float_rounding


@given(st.integers(0, LONGEST), st.integers(0, LONGEST), ALPHAS)
def test_e2_whole_numbers_are_the_exact_average_rounded_down(average, observation, alpha):
    exact = Fraction(alpha) * observation + (1 - Fraction(alpha)) * average
    assert moved(average, observation, *alpha.as_integer_ratio()) == exact // 1

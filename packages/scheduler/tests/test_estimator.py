"""Rules E1 to E5 in production, number by number as the specification computes them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import batchjob_spec.estimator as spec
from batchjob_scheduler.estimator import DecodeLengthEstimator, held_between, remaining_tokens


@given(
    st.lists(st.integers(0, 100_000), max_size=30),
    st.floats(0, 1, exclude_min=True),
)
def test_both_predict_the_same_after_any_observations(observed, alpha):
    production, expected = DecodeLengthEstimator(alpha), spec.Estimate()
    for tokens in observed:
        production.observe(tokens)
        expected = spec.observe(expected, tokens, alpha)
    assert production.predicted_tokens == spec.predicted_tokens(expected)
    assert production.observations == expected.observations


@given(st.data())
def test_both_predict_the_same_for_one_request(data):
    predicted, output = data.draw(st.integers(0, 9999)), data.draw(st.integers(0, 9999))
    max_tokens = data.draw(st.integers(1, 9999))
    min_tokens = data.draw(st.integers(0, max_tokens))
    within = spec.held_between(predicted, min_tokens, max_tokens)
    assert held_between(predicted, min_tokens, max_tokens) == within
    assert remaining_tokens(within, output) == spec.remaining_tokens(within, output)

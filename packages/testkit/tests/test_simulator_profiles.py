"""The device profiles: hand-computed constants, and a fit that finds them again."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from batchjob_testkit.simulator.fit import StepLogError, StepRow, fit_profile, read_step_log
from batchjob_testkit.simulator.profiles import LLAMA_8B, PROFILES, TIMINGS, DeviceProfile

CONSTANTS = ("overhead_seconds", "seconds_per_token", "weight_seconds", "seconds_per_context_token")

TOY = DeviceProfile(
    name="toy",
    overhead_seconds=0.002,
    seconds_per_token=30e-6,
    weight_seconds=0.006,
    seconds_per_context_token=50e-9,
    num_blocks=1000,
)


def test_the_model_is_what_its_card_says():
    assert LLAMA_8B.weight_bytes == 16.06e9
    assert LLAMA_8B.kv_bytes_per_token == 128 * 1024  # 2 * 32 layers * 8 heads * 128 values * 2 bytes


@pytest.mark.parametrize(
    ("name", "constants", "blocks"),
    [
        # 16.06e9 / (989e12 * 0.6), 16.06e9 / (3.35e12 * 0.8), 131,072 / (3.35e12 * 0.8);
        # 80e9 * 0.9 - 16.06e9 - 3e9 bytes in blocks of 16 * 131,072.
        ("h100", (2e-3, 27.06e-6, 5.993e-3, 48.91e-9), 25243),
        # 16.06e9 / (313e12 * 0.6), 16.06e9 / (1.6e12 * 0.75), 131,072 / (1.6e12 * 0.75);
        # 64e9 * 0.9 - 16.06e9 - 3e9 bytes.
        ("ascend_910b", (5e-3, 85.52e-6, 13.383e-3, 109.2e-9), 18377),
    ],
)
def test_the_constants_follow_from_the_data_sheet(name, constants, blocks):
    profile = PROFILES[name]
    assert tuple(getattr(profile, constant) for constant in CONSTANTS) == pytest.approx(constants, rel=1e-3)
    assert profile.num_blocks == blocks


def test_a_step_reads_the_cache_after_the_products_or_at_the_same_time():
    # 100 tokens: 3 ms of products, under the 6 ms of the weights; 40,000 tokens of context: 2 ms.
    assert TOY.step_seconds("serial", 100, 40_000) == pytest.approx(0.002 + 0.006 + 0.002)
    assert TOY.step_seconds("overlap", 100, 40_000) == pytest.approx(0.002 + 0.006 + 0.002)
    # 300 tokens: 9 ms of products, over the 6 + 2 ms of memory.
    assert TOY.step_seconds("serial", 300, 40_000) == pytest.approx(0.002 + 0.009 + 0.002)
    assert TOY.step_seconds("overlap", 300, 40_000) == pytest.approx(0.002 + 0.009)


def log_of(profile, timing, noise=0.0):
    generator = Random(1)
    rows = []
    for number in range(400):
        tokens = generator.randint(1, 256) if number % 2 else generator.randint(300, 8192)
        context = generator.randint(1000, 300_000)
        seconds = profile.step_seconds(timing, tokens, context) * (1 + generator.uniform(-noise, noise))
        rows.append(StepRow(tokens, context, seconds))
    return rows


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("profile", [TOY, *PROFILES.values()], ids=lambda profile: profile.name)
def test_a_fit_finds_the_profile_that_made_the_log(profile, timing):
    fit = fit_profile(log_of(profile, timing), TOY)
    assert fit.timing == timing
    assert fit.error_seconds < 1e-9
    for constant in CONSTANTS:
        assert getattr(fit.profile, constant) == pytest.approx(getattr(profile, constant), rel=1e-4), constant
    assert fit.profile.num_blocks == TOY.num_blocks


@pytest.mark.parametrize("timing", TIMINGS)
def test_a_fit_of_a_noisy_log_predicts_its_time(timing):
    rows = log_of(TOY, timing, noise=0.05)
    fit = fit_profile(rows, TOY)
    predicted = sum(fit.profile.step_seconds(fit.timing, row.tokens, row.context_tokens) for row in rows)
    assert predicted == pytest.approx(sum(row.seconds for row in rows), rel=0.01)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("missing", CONSTANTS)
def test_a_constant_that_is_too_small_to_be_seen_is_not_negative(timing, missing):
    """On a tiny model the weights take no time, on a large one the overhead takes none."""
    rows = log_of(replace(TOY, **{missing: 0.0}), timing, noise=0.05)
    fit = fit_profile(rows, TOY)
    assert all(getattr(fit.profile, constant) >= 0 for constant in CONSTANTS)
    predicted = sum(fit.profile.step_seconds(fit.timing, row.tokens, row.context_tokens) for row in rows)
    assert predicted == pytest.approx(sum(row.seconds for row in rows), rel=0.01)


def test_steps_of_one_kind_determine_no_profile():
    with pytest.raises(StepLogError, match="some steps of few tokens and some of thousands"):
        fit_profile([StepRow(64, 64_000, 0.01)] * 100, TOY)
    with pytest.raises(StepLogError, match="3 steps, allowed: at least 8"):
        fit_profile([StepRow(64, 64_000, 0.01)] * 3, TOY)


def test_a_log_is_read_from_a_file(tmp_path):
    file = tmp_path / "steps.csv"
    file.write_text("seconds,tokens,context_tokens\n0.01,64,2000\n0.5,8192,8192\n")
    assert read_step_log(file) == [StepRow(64, 2000, 0.01), StepRow(8192, 8192, 0.5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens,seconds\n1,2\n", r"steps.csv:1: columns \['tokens', 'seconds'\], allowed: tokens, context"),
        ("", r"steps.csv:1: columns None, allowed: tokens, context_tokens, seconds at least"),
        ("tokens,context_tokens,seconds\n1,2,3\n1,2,-3\n", "steps.csv:3: seconds is '-3', allowed: a number"),
        ("tokens,context_tokens,seconds\n1,x,3\n", "steps.csv:2: context_tokens is 'x', allowed: a number"),
        ("tokens,context_tokens,seconds\n1,2\n", "steps.csv:2: seconds is None, allowed: a number"),
        ("tokens,context_tokens,seconds\nnan,2,3\n", "steps.csv:2: tokens is 'nan', allowed: a number"),
    ],
)
def test_a_wrong_log_is_refused_with_its_place(tmp_path, text, message):
    file = tmp_path / "steps.csv"
    file.write_text(text)
    with pytest.raises(StepLogError, match=message):
        read_step_log(file)

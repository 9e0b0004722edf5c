"""The configuration section: its documented keys and defaults, and one clear message for each mistake."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace

import pytest

from batchjob_scheduler.config import (
    BatchJobConfig,
    ConfigError,
    find_section,
    parse_section,
    requested,
    settings_of,
    without_section,
)

# The feature guide's table, the weight of the average that it calls EWMA, and what goes beyond it.
DOCUMENTED_DEFAULTS = {
    "enabled": False,
    "max_jobs": 20,
    "reserve_margin_blocks": 2,
    "reserve_max_blocks": 8,
    "low_available_tokens_threshold": 4096,
    "short_decode_token_threshold": 32,
    "ewma_alpha": 0.1,
    "order": "lpt",
    "look_ahead": True,
    "step_shaping": True,
    "guide_only": False,
}


def nested(section):
    return {"scheduler_config": {"batch_job_sched_config": section}}


def legacy(section):
    return {"batch_job_sched_config": section}


def test_keys_and_defaults_are_the_documented_ones():
    assert BatchJobConfig().model_dump() == DOCUMENTED_DEFAULTS


@pytest.mark.parametrize("place", [nested, legacy])
def test_the_section_is_found_in_both_places(place):
    config = requested(place({"enabled": True, "max_jobs": 10}))
    assert config is not None
    assert config.max_jobs == 10


@pytest.mark.parametrize(
    "additional_config",
    [
        None,
        {},
        {"scheduler_config": {}},
        {"scheduler_config": None},
        {"torchair_graph_config": {"enabled": True}},
        nested({}),
        nested({"max_jobs": 5}),
        nested({"enabled": False}),
        legacy({"enabled": False}),
    ],
)
def test_without_enabled_true_nothing_is_requested(additional_config):
    assert requested(additional_config) is None


def test_enabled_false_gets_the_user_going_whatever_else_is_wrong():
    assert requested(nested({"enabled": False, "max_jobs": "many", "colour": 1})) is None


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("enabled", "true", "true or false"),
        ("enabled", 1, "true or false"),
        ("enabled", None, "true or false"),
        ("max_jobs", -1, "an integer of at least 0"),
        ("max_jobs", True, "an integer of at least 0"),
        ("max_jobs", 2.5, "an integer of at least 0"),
        ("max_jobs", "20", "an integer of at least 0"),
        ("reserve_margin_blocks", -1, "an integer of at least 0"),
        ("reserve_max_blocks", None, "an integer of at least 0"),
        ("low_available_tokens_threshold", [], "an integer of at least 0"),
        ("short_decode_token_threshold", -32, "an integer of at least 0"),
        ("ewma_alpha", 0, "a number above 0 and up to 1"),
        ("ewma_alpha", 1.5, "a number above 0 and up to 1"),
        ("ewma_alpha", float("nan"), "a number above 0 and up to 1"),
        ("ewma_alpha", "0.1", "a number above 0 and up to 1"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(key, value, allowed):
    with pytest.raises(ConfigError) as raised:
        parse_section({"enabled": True, key: value})
    assert str(raised.value) == f"batch_job_sched_config.{key}: got {value!r}, allowed: {allowed}"


def test_an_unknown_key_is_named_with_the_known_ones():
    with pytest.raises(ConfigError) as raised:
        requested(nested({"enabled": True, "max_job": 5}))
    message = str(raised.value)
    assert message.startswith("batch_job_sched_config.max_job: got 5, allowed: the keys enabled, ")
    assert all(key in message for key in DOCUMENTED_DEFAULTS)
    assert "did you mean 'max_jobs'?" in message


def test_one_key_switches_off_what_goes_beyond_the_guide():
    config = BatchJobConfig(guide_only=True)
    assert (config.order, config.look_ahead, config.step_shaping) == ("lpt", False, False)


def test_a_key_of_its_own_wins_over_the_one_that_switches_all_off():
    config = BatchJobConfig(guide_only=True, look_ahead=True)
    assert (config.look_ahead, config.step_shaping) == (True, False)


@pytest.mark.parametrize("order", ["fcfs", "", None, 1])
def test_another_order_is_refused(order):
    with pytest.raises(ConfigError, match=r"batch_job_sched_config.order: got .* allowed: 'lpt' or 'blend'"):
        requested(nested({"enabled": True, "order": order}))


def test_a_misspelt_enabled_is_not_silently_off():
    with pytest.raises(ConfigError, match="did you mean 'enabled'"):
        requested(nested({"enabeld": True}))


@pytest.mark.parametrize("section", [True, "enabled", 5, None, []])
def test_a_section_that_is_no_object_is_refused(section):
    with pytest.raises(ConfigError, match=r"batch_job_sched_config: got .* an object"):
        requested(nested(section))


def test_a_section_in_both_places_is_refused():
    both = {**nested({"enabled": True}), **legacy({"enabled": True})}
    with pytest.raises(ConfigError, match="allowed: one place"):
        find_section(both)


@pytest.mark.parametrize(
    "additional_config",
    [
        {"scheduler_config": {"batch_job_scheduler_config": {"enabled": True}}},
        {"batch_job_sched_conf": {"enabled": True}},
        {"schedular_config": {"batch_job_sched_config": {"enabled": True}}},
    ],
)
def test_a_misspelt_section_is_not_silently_ignored(additional_config):
    with pytest.raises(ConfigError, match="allowed: the name"):
        requested(additional_config)


def engine_config(additional_config, **carried):
    return SimpleNamespace(additional_config=additional_config, scheduler_config=SimpleNamespace(**carried))


def test_the_class_name_alone_switches_on_with_the_defaults():
    assert settings_of(engine_config({})) == BatchJobConfig()
    assert settings_of(engine_config(nested({"max_jobs": 3}))).max_jobs == 3


def test_what_the_plugin_left_at_the_engines_configuration_is_what_holds():
    carried = {"batch_job_sched_config": BatchJobConfig(max_jobs=7)}
    assert settings_of(engine_config({}, **carried)).max_jobs == 7


@pytest.mark.parametrize("place", [nested, legacy])
def test_the_section_is_taken_out_and_the_rest_stays(place):
    rest = {
        "scheduler_config": {"enable_balance_scheduling": False},
        "torchair_graph_config": {"enabled": True},
    }
    given = {**rest, **place({"enabled": True})}
    if place is nested:
        given["scheduler_config"] = {**rest["scheduler_config"], **given["scheduler_config"]}
    before = deepcopy(given)
    assert without_section(given) == rest
    assert given == before


@pytest.mark.parametrize("untouched", [None, {}, {"scheduler_config": None}, {"other": 1}])
def test_without_a_section_nothing_is_taken_out(untouched):
    assert without_section(untouched) is untouched


def test_the_message_at_the_start_states_every_setting():
    for key in DOCUMENTED_DEFAULTS.keys() - {"enabled"}:
        assert f"{key}=" in str(BatchJobConfig())

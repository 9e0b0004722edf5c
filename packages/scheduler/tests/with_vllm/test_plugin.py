"""The plug-in: which class the engine configuration names for which ``additional_config``."""

from __future__ import annotations

import inspect
import pickle
from types import SimpleNamespace

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from batchjob_scheduler import plugin, scheduler
from batchjob_scheduler.config import BatchJobConfig, ConfigError, settings_of
from batchjob_scheduler.scheduler import BatchJobAwareAsyncScheduler, BatchJobAwareScheduler
from batchjob_testkit.tiny_model import make_tiny_model
from batchjob_testkit.vllm_scheduler import EngineOptions, VirtualEngine

pytestmark = pytest.mark.vllm

SYNC = "batchjob_scheduler.scheduler.BatchJobAwareScheduler"
ASYNC = "batchjob_scheduler.scheduler.BatchJobAwareAsyncScheduler"
ON = {"scheduler_config": {"batch_job_sched_config": {"enabled": True}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def chosen(model):
    """The scheduler class in the engine configuration that the arguments lead to."""

    def create(engine_args=EngineArgs, **options):
        args = engine_args(model=model, **options)
        return args.create_engine_config().scheduler_config.scheduler_cls

    return create


def test_the_entry_point_is_installed():
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="vllm.general_plugins", name="batchjob")
    assert entry.load() is plugin.register


@pytest.mark.parametrize("engine_args", [EngineArgs, AsyncEngineArgs])
@pytest.mark.parametrize(
    "additional_config", [ON, {"batch_job_sched_config": {"enabled": True, "max_jobs": 10}}]
)
def test_the_section_selects_our_class(chosen, engine_args, additional_config):
    # vLLM's CPU platform turns async scheduling off.
    assert chosen(engine_args, additional_config=additional_config) == SYNC


@pytest.mark.parametrize(
    "additional_config",
    [{}, {"scheduler_config": {"batch_job_sched_config": {"enabled": False, "max_jobs": "x"}}}],
)
def test_without_it_vllm_is_as_it_was(chosen, additional_config):
    assert chosen(additional_config=additional_config) is None


def test_an_asynchronous_engine_gets_the_asynchronous_class():
    config = SimpleNamespace(scheduler_cls=None, async_scheduling=True)
    plugin._select(config, BatchJobConfig())
    assert config.scheduler_cls == ASYNC


@pytest.mark.parametrize("named", [SYNC, ASYNC, BatchJobAwareScheduler, BatchJobAwareAsyncScheduler])
@pytest.mark.parametrize(("is_async", "right"), [(False, SYNC), (True, ASYNC)])
def test_of_our_two_classes_the_engine_gets_the_one_that_goes_with_its_scheduling(named, is_async, right):
    """Whichever was named: the other is slower, or, with several pipeline stages, wrong."""
    config = SimpleNamespace(scheduler_cls=named, async_scheduling=is_async)
    plugin._select(config, BatchJobConfig())
    assert config.scheduler_cls == right


@pytest.mark.parametrize("additional_config", [{}, ON, {"batch_job_sched_config": {"max_jobs": 3}}])
def test_the_asynchronous_class_by_its_name_is_replaced_where_nothing_is_asynchronous(
    chosen, additional_config
):
    assert chosen(additional_config=additional_config, scheduler_cls=ASYNC) == SYNC


class OfAUser(BatchJobAwareAsyncScheduler):
    """A class that derives from ours."""


def test_a_class_of_a_users_own_stays(chosen):
    assert chosen(additional_config=ON, scheduler_cls=OfAUser) is OfAUser


@pytest.mark.parametrize("name", ["batchjob_scheduler.scheduler.Scheduler", "batchjob_scheduler.scheduler.X"])
def test_a_class_that_we_have_not_is_refused(chosen, name):
    with pytest.raises(ConfigError, match=f"--scheduler-cls: got '{name}', allowed: {SYNC} or {ASYNC}"):
        chosen(scheduler_cls=name)


@pytest.fixture
def warnings(monkeypatch):
    """What our scheduler warns of when it is made."""
    said = []
    monkeypatch.setattr(scheduler.logger, "warning", lambda text, *values: said.append(text % values))
    return said


@pytest.mark.parametrize("cls", [BatchJobAwareScheduler, BatchJobAwareAsyncScheduler, OfAUser])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_class_that_does_not_go_with_the_engines_scheduling_says_so_once(cls, is_async, warnings):
    """Where the plug-in did not put the other in its place."""
    VirtualEngine(cls, EngineOptions(async_scheduling=is_async))
    fits = is_async == (cls is not BatchJobAwareScheduler)
    assert len(warnings) == (not fits)
    for warning in warnings:
        assert f"{cls.__name__} is not for that" in warning
        assert f"{ASYNC if is_async else SYNC} is" in warning


def test_a_class_by_its_name_says_that_the_filter_leaves_the_plug_in_out(warnings, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "ascend")
    VirtualEngine(BatchJobAwareScheduler)
    (warning,) = warnings
    assert warning.startswith("VLLM_PLUGINS='ascend' leaves batchjob out: the scheduler is on by its name, ")


@pytest.mark.parametrize("allowed", [None, "batchjob", "ascend,batchjob"])
def test_a_filter_that_lets_the_plug_in_through_is_no_matter(allowed, warnings, monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    VirtualEngine(BatchJobAwareScheduler)
    assert warnings == []


def test_a_wrong_setting_ends_the_start_before_anything_is_loaded(chosen):
    wrong = {"scheduler_config": {"batch_job_sched_config": {"enabled": True, "max_jobs": -1}}}
    with pytest.raises(ConfigError, match="max_jobs: got -1"):
        chosen(additional_config=wrong)


def test_our_class_may_be_named_beside_the_section(chosen):
    assert chosen(additional_config=ON, scheduler_cls=SYNC) == SYNC


@pytest.mark.parametrize("other", ["vllm.v1.core.sched.scheduler.Scheduler", "some.where.OtherScheduler"])
def test_another_class_beside_the_section_is_refused(chosen, other):
    with pytest.raises(ConfigError, match=f"--scheduler-cls: got '{other}', allowed: none, or"):
        chosen(additional_config=ON, scheduler_cls=other)


def test_a_platforms_scheduler_of_another_purpose_is_refused():
    chosen = "vllm_ascend.core.recompute_scheduler.RecomputeScheduler"
    config = SimpleNamespace(scheduler_cls=chosen, async_scheduling=False)
    with pytest.raises(ConfigError, match=f"the platform's scheduler: got '{chosen}', allowed: none, or"):
        plugin._select(config, BatchJobConfig())


@pytest.mark.parametrize("place", [dict, lambda **switch: {"scheduler_config": switch}])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("short_request_first_config", {"enabled": True}),
        ("profiling_chunk_config", {"enabled": True}),
        ("dyntra_lb_config", {"enabled": True}),
        ("recompute_scheduler_enable", True),
        ("enable_balance_scheduling", True),
        ("SLO_limits_for_dynamic_batch", 50),
    ],
)
def test_a_scheduler_that_alters_vllms_own_is_refused(chosen, place, key, value):
    """Some of vllm-ascend's name no class, so that only their switch shows them."""
    both = {"batch_job_sched_config": {"enabled": True}, **place(**{key: value})}
    with pytest.raises(ConfigError) as raised:
        chosen(additional_config=both)
    assert str(raised.value) == (
        f"{key}: got {value!r}, allowed: off, while batch_job_sched_config.enabled is true"
    )


@pytest.mark.parametrize("no", [False, None, 0, "false", "False", "0", "off"])
def test_a_scheduler_that_is_switched_off_is_no_matter(chosen, no):
    """A switch of vllm-ascend's may be a text."""
    off = {"short_request_first_config": {"enabled": no}, "recompute_scheduler_enable": no}
    assert chosen(additional_config={**ON, **off, "SLO_limits_for_dynamic_batch": -1}) == SYNC


def test_the_variable_of_balance_scheduling_is_refused(chosen, monkeypatch):
    monkeypatch.setenv("VLLM_ASCEND_BALANCE_SCHEDULING", "1")
    with pytest.raises(ConfigError, match="VLLM_ASCEND_BALANCE_SCHEDULING: got '1', allowed: off"):
        chosen(additional_config=ON)


@pytest.mark.parametrize("settings", [{"enabled": True}, {"enabled": False}, {}])
def test_the_section_reaches_no_platform(model, settings):
    """vllm-ascend checks ``additional_config`` in each process, and would select its own scheduler."""
    given = {"scheduler_config": {"batch_job_sched_config": {"max_jobs": 3, **settings}}}
    args = EngineArgs(model=model, additional_config=given)
    config = args.create_engine_config()
    assert config.additional_config == {"scheduler_config": {}}
    assert args.additional_config is given


def test_the_settings_travel_with_the_configuration(model):
    """The engine's process unpickles it, and checks it anew after its handshake."""
    given = {"batch_job_sched_config": {"enabled": True, "max_jobs": 3}}
    config = pickle.loads(
        pickle.dumps(EngineArgs(model=model, additional_config=given).create_engine_config())
    )
    config.__post_init__()
    assert config.scheduler_config.scheduler_cls == SYNC
    assert settings_of(config) == BatchJobConfig(enabled=True, max_jobs=3)


def test_the_settings_reach_a_class_that_was_named(model):
    given = {"batch_job_sched_config": {"max_jobs": 3}}
    config = EngineArgs(model=model, additional_config=given, scheduler_cls=SYNC).create_engine_config()
    assert config.scheduler_config.scheduler_cls == SYNC
    assert settings_of(config).max_jobs == 3


def test_a_failed_start_leaves_the_arguments_as_they_were(model):
    args = EngineArgs(model=model, additional_config=ON, max_model_len=10**9)
    with pytest.raises(ValueError, match="max_model_len"):
        args.create_engine_config()
    assert args.additional_config is ON


def test_registering_twice_wraps_once():
    plugin.register()
    once = EngineArgs.create_engine_config
    plugin.register()
    assert EngineArgs.create_engine_config is once


def test_the_names_of_the_plugin_are_those_of_the_classes():
    for name in (SYNC, ASYNC):
        assert getattr(scheduler, name.rpartition(".")[2]).__module__ == scheduler.__name__


def test_what_the_plugin_wraps_is_as_it_expects():
    assert inspect.isasyncgenfunction(AsyncLLM.generate)
    assert {"additional_config", "scheduler_cls"} <= {*inspect.signature(EngineArgs).parameters}

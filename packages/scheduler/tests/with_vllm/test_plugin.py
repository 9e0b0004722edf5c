"""The plug-in: which class the engine configuration names for which ``additional_config``."""

from __future__ import annotations

import inspect

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from batchjob_scheduler import plugin, scheduler
from batchjob_scheduler.config import ConfigError
from batchjob_testkit.tiny_model import make_tiny_model

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
    class Config:
        scheduler_cls = None
        async_scheduling = True

    plugin._select(Config)
    assert Config.scheduler_cls == ASYNC


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


def test_a_platforms_scheduler_of_the_same_purpose_is_replaced():
    class Config:
        scheduler_cls = "vllm_ascend.core.batch_job_aware_scheduler.BatchJobAwareScheduler"
        async_scheduling = False

    plugin._select(Config)
    assert Config.scheduler_cls == SYNC


def test_a_platforms_scheduler_of_another_purpose_is_refused():
    class Config:
        scheduler_cls = "vllm_ascend.core.recompute_scheduler.RecomputeScheduler"
        async_scheduling = False

    with pytest.raises(ConfigError, match="the platform's scheduler: got 'vllm_ascend"):
        plugin._select(Config)


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

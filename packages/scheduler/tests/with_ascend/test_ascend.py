"""The real platform code of vllm-ascend, and its scheduler's base, with our section in the configuration."""

from __future__ import annotations

import pickle
from importlib.util import find_spec

import pytest
import vllm.v1.core.sched.scheduler as vllm_scheduler
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm_ascend import ascend_config

from batchjob_scheduler.config import BatchJobConfig, ConfigError, settings_of
from batchjob_scheduler.plugin import ASCEND_SCHEDULERS, ASYNC_CLASS, SYNC_CLASS, register
from batchjob_testkit.tiny_model import make_tiny_model
from batchjob_testkit.vllm_scheduler import EngineOptions, VirtualEngine

pytestmark = pytest.mark.ascend

BLOCK = 128
HAS_ITS_OWN = find_spec("vllm_ascend.core.batch_job_aware_scheduler") is not None
# From this release on the schedulers have a section of their own.
HAS_SCHEDULER_CONFIG = hasattr(ascend_config, "SchedulerConfig")

DOCUMENTED = {
    "max_jobs": 10,
    "reserve_margin_blocks": 4,
    "reserve_max_blocks": 12,
    "low_available_tokens_threshold": 2048,
    "short_decode_token_threshold": 32,
}
BEYOND_THE_GUIDE = {
    "ewma_alpha": 0.2,
    "order": "blend",
    "look_ahead": False,
    "step_shaping": False,
    "guide_only": True,
}


def nested(**settings):
    return {"scheduler_config": {"batch_job_sched_config": {"enabled": True, **settings}}}


def direct(**settings):
    return {"batch_job_sched_config": {"enabled": True, **settings}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def a_new_process():
    """vllm-ascend keeps the first configuration that it saw in a process."""
    ascend_config.clear_ascend_config()


@pytest.fixture
def arguments(model):
    register()

    def make(additional_config, **options):
        return EngineArgs(model=model, max_model_len=512, additional_config=additional_config, **options)

    return make


@pytest.fixture
def engine_config(arguments):
    """The engine's configuration, as the front end makes it."""

    def make(additional_config, **options):
        return arguments(additional_config, **options).create_engine_config()

    return make


@pytest.fixture
def without_the_plugin(arguments):
    """The same, as vllm-ascend makes it by itself."""

    def make(additional_config, **options):
        return EngineArgs.create_engine_config.__wrapped__(arguments(additional_config, **options))

    return make


def in_the_engines_process(config):
    """What arrives there, checked once more as vLLM does after its handshake."""
    ascend_config.clear_ascend_config()
    arrived = pickle.loads(pickle.dumps(config))
    arrived.__post_init__()
    return arrived


def test_the_platform_is_vllm_ascends():
    assert type(current_platform).__name__ == "NPUPlatform"


# --- which class, with which settings ----------------------------------------------------------------


@pytest.mark.parametrize(("asynchronous", "expected"), [(False, SYNC_CLASS), (True, ASYNC_CLASS)])
@pytest.mark.parametrize("place", [nested, direct])
@pytest.mark.parametrize("settings", [{}, DOCUMENTED, BEYOND_THE_GUIDE], ids=["bare", "guide", "beyond"])
def test_the_section_selects_our_class_in_every_process(
    engine_config, place, settings, asynchronous, expected
):
    config = engine_config(place(**settings), async_scheduling=asynchronous)
    for seen in (config, in_the_engines_process(config)):
        assert seen.scheduler_config.scheduler_cls == expected
        assert settings_of(seen) == BatchJobConfig(enabled=True, **settings)
        assert seen.cache_config.block_size == BLOCK


def test_no_key_of_ours_was_left_out_above():
    assert {"enabled", *DOCUMENTED, *BEYOND_THE_GUIDE} == BatchJobConfig.model_fields.keys()


@pytest.mark.parametrize(("asynchronous", "expected"), [(False, SYNC_CLASS), (True, ASYNC_CLASS)])
@pytest.mark.parametrize("named", [SYNC_CLASS, ASYNC_CLASS])
@pytest.mark.parametrize("additional_config", [{}, nested()], ids=["class", "class and section"])
def test_either_class_by_its_name_becomes_the_one_that_goes_with_the_scheduling(
    engine_config, additional_config, named, asynchronous, expected
):
    config = engine_config(additional_config, scheduler_cls=named, async_scheduling=asynchronous)
    for seen in (config, in_the_engines_process(config)):
        assert seen.scheduler_config.scheduler_cls == expected


def test_without_the_plugin_vllm_ascend_would_decide(without_the_plugin):
    chosen = without_the_plugin(nested(), async_scheduling=False).scheduler_config.scheduler_cls
    own = "vllm_ascend.core.batch_job_aware_scheduler.BatchJobAwareScheduler"
    assert chosen == (own if HAS_ITS_OWN else None)


def test_without_the_plugin_and_the_section_our_class_by_its_name_stays(without_the_plugin):
    config = without_the_plugin({}, scheduler_cls=SYNC_CLASS, async_scheduling=False)
    assert config.scheduler_config.scheduler_cls == SYNC_CLASS


def test_the_configuration_of_vllm_ascend_itself_still_arrives(engine_config):
    given = {**nested(), "enable_cpu_binding": False}
    config = in_the_engines_process(engine_config(given))
    assert config.additional_config["enable_cpu_binding"] is False
    assert ascend_config.init_ascend_config(config).enable_cpu_binding is False


def test_enabled_false_gets_the_user_going_whatever_else_is_wrong(engine_config):
    wrong = {"scheduler_config": {"batch_job_sched_config": {"enabled": False, "max_jobs": "many", "x": 1}}}
    config = in_the_engines_process(engine_config(wrong, async_scheduling=False))
    assert config.scheduler_config.scheduler_cls is None


def test_a_wrong_value_ends_the_start_with_our_message(engine_config):
    with pytest.raises(ConfigError, match="max_jobs: got -5, allowed: an integer of at least 0"):
        engine_config(nested(max_jobs=-5))


# --- beside its other schedulers ---------------------------------------------------------------------


@pytest.mark.parametrize("key", ASCEND_SCHEDULERS)
def test_each_other_scheduler_beside_ours_is_one_clear_sentence(engine_config, key):
    value = {"enabled": True} if key.endswith("_config") else True
    with pytest.raises(ConfigError, match=f"^{key}: got .*, allowed: off, while batch_job_sched_config"):
        engine_config({"scheduler_config": {"batch_job_sched_config": {"enabled": True}, key: value}})


def test_no_other_scheduler_of_this_release_is_forgotten(engine_config):
    ours = {"batch_job_sched_config"}
    known = ascend_config.init_ascend_config(engine_config(nested()))
    if HAS_SCHEDULER_CONFIG:
        assert vars(known.scheduler_config).keys() - ours <= {*ASCEND_SCHEDULERS}
    else:
        of_the_time = {*ASCEND_SCHEDULERS} - {"short_request_first_config", "dyntra_lb_config"}
        assert of_the_time <= vars(known).keys()


def test_its_own_class_by_name_beside_the_section_is_refused(engine_config):
    own = "vllm_ascend.core.batch_job_aware_scheduler.BatchJobAwareScheduler"
    with pytest.raises(ConfigError, match=f"--scheduler-cls: got '{own}', allowed: none, or"):
        engine_config(nested(), scheduler_cls=own)


# --- on the scheduler that vllm-ascend puts in the place of vLLM's -----------------------------------


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def virtual_engine(request, engine_config):
    engine_config({})  # lets the platform replace what it replaces
    from batchjob_scheduler.scheduler import BatchJobAwareAsyncScheduler, BatchJobAwareScheduler

    cls = BatchJobAwareAsyncScheduler if request.param else BatchJobAwareScheduler

    def make(**options):
        return VirtualEngine(cls, EngineOptions(async_scheduling=request.param, block_size=BLOCK, **options))

    return make


def test_our_classes_derive_from_what_is_there(virtual_engine):
    from batchjob_scheduler.scheduler import BatchJobAwareAsyncScheduler, BatchJobAwareScheduler

    replaced = vllm_scheduler.Scheduler
    assert replaced.__module__.startswith("vllm_ascend.")
    assert issubclass(BatchJobAwareScheduler, replaced)
    assert issubclass(BatchJobAwareAsyncScheduler, replaced)


@pytest.mark.parametrize("usable_blocks", [12, 200])
def test_a_batch_runs_to_the_end_and_no_block_leaks(virtual_engine, usable_blocks):
    e = virtual_engine(num_blocks=usable_blocks + 1, max_num_batched_tokens=512, max_model_len=1024)
    lengths = {}
    for number in range(30):
        name = f"chatcmpl-#job_name[job {number % 3}]#{number}-5f3a"
        lengths[name] = 1 + number * 37 % 300
        e.submit(name, 1 + number * 29 % 400, lengths[name])
    e.run()
    e.check_integrity()
    assert {name: len(outcome.tokens) for name, outcome in e.outcomes.items()} == lengths
    assert {outcome.finish_reason for outcome in e.outcomes.values()} == {"stop"}


def test_a_request_larger_than_the_pool_ends_with_the_numbers(virtual_engine):
    e = virtual_engine(num_blocks=5, max_model_len=1024)
    e.submit("giant", 5 * BLOCK, 5)
    e.submit("small", BLOCK, 5)
    e.run()
    e.check_integrity()
    assert "5 KV cache blocks" in e.outcomes["giant"].stop_reason
    assert e.outcomes["small"].finish_reason == "stop"

"""Each name of vLLM that is used, so that a change of one is told by its name and its version."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from batchjob_scheduler import compat, scheduler
from batchjob_scheduler.compat import UnsupportedEngineError
from batchjob_scheduler.queue import BatchJobQueue
from batchjob_scheduler.scheduler import BatchJobAwareScheduler
from batchjob_testkit.tiny_model import make_tiny_model
from batchjob_testkit.vllm_scheduler import EngineOptions, VirtualEngine

pytestmark = pytest.mark.vllm

VERSION = compat.released(vllm.__version__) or compat.released(compat.NEWEST)
ON = {"batch_job_sched_config": {"enabled": True}}
OFF = {"batch_job_sched_config": {"enabled": False}}

# What is called, and what calls us, with its parameters: each time they changed, from which version on.
PARAMETERS = {
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": {
        "0.23.0": "self",
        "0.25.1": "self throttle_prefills",
    },
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": {
        "0.23.0": "self scheduler_output model_runner_output"
    },
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": {"0.23.0": "self request_ids finished_status"},
    "vllm.v1.core.sched.scheduler:Scheduler.has_unfinished_requests": {"0.23.0": "self"},
    "vllm.v1.core.sched.scheduler:Scheduler.shutdown": {"0.23.0": "self"},
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate": {
        "0.23.0": "self request_id num_tokens new_computed_blocks num_encoder_tokens total_computed_tokens "
        "num_tokens_main_model apply_admission_cap",
        "0.26.0": "self request_id num_tokens new_computed_blocks num_encoder_tokens total_computed_tokens "
        "num_local_computed_tokens num_tokens_main_model apply_admission_cap",
        "0.32.0": "self request_id num_tokens new_computed_blocks num_encoder_tokens total_computed_tokens "
        "num_local_computed_tokens num_tokens_main_model apply_admission_cap prefill_end",
    },
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": {"0.23.0": "self"},
    "vllm.v1.core.sched.request_queue:RequestQueue.add_request": {"0.23.0": "self request"},
    "vllm.v1.core.sched.request_queue:RequestQueue.peek_request": {"0.23.0": "self"},
    "vllm.v1.core.sched.request_queue:RequestQueue.pop_request": {"0.23.0": "self"},
    "vllm.v1.core.sched.request_queue:RequestQueue.prepend_request": {"0.23.0": "self request"},
    "vllm.v1.core.sched.request_queue:RequestQueue.prepend_requests": {"0.23.0": "self requests"},
    "vllm.v1.core.sched.request_queue:RequestQueue.remove_request": {"0.23.0": "self request"},
    "vllm.v1.core.sched.request_queue:RequestQueue.remove_requests": {"0.23.0": "self requests"},
    "vllm.v1.request:Request.take_events": {"0.23.0": "self"},
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": {"0.23.0": "self usage_context headless"},
    "vllm.v1.engine.async_llm:AsyncLLM.generate": {
        "0.23.0": "self prompt sampling_params request_id prompt_text lora_request tokenization_kwargs "
        "trace_headers priority data_parallel_rank reasoning_ended reasoning_parser_kwargs",
        "0.28.0": "self prompt sampling_params request_id prompt_text lora_request tokenization_kwargs "
        "trace_headers priority data_parallel_rank session_id reasoning_ended reasoning_parser_kwargs",
        "0.32.0": "self prompt sampling_params request_id prompt_text lora_request tokenization_kwargs "
        "trace_headers priority data_parallel_rank session_id kv_hints reasoning_ended "
        "reasoning_parser_kwargs",
    },
}
# Names of which a version has one or the other, and in which versions that is known.
ALTERNATIVES = {
    "kv_holding_waiting": ("0.31.0", "99.0.0"),
    "skipped_waiting": ("0.0.0", "0.30.99"),
}


@pytest.fixture(scope="module")
def engine():
    return VirtualEngine(Scheduler, EngineOptions())


# --- names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", compat.NAMES)
def test_every_name_is_there(where):
    assert list(compat._missing(where, compat.NAMES[where])) == []


@pytest.mark.parametrize("name", compat.NAMES["vllm.v1.core.sched.scheduler:Scheduler"])
def test_a_scheduler_has(engine, name):
    assert any(hasattr(engine.scheduler, either) for either in name.split("|"))


@pytest.mark.parametrize("name", compat.NAMES["vllm.v1.request:Request"])
def test_a_request_has(engine, name):
    assert hasattr(engine.submit(f"has {name}", 5, 5), name)


@pytest.mark.parametrize("name", compat.NAMES["vllm.sampling_params:SamplingParams"])
def test_sampling_parameters_have(engine, name):
    assert hasattr(engine.submit(f"samples {name}", 5, 5).sampling_params, name)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_parameters_are_those_known(name):
    path, _, method = name.rpartition(".")
    module, _, owner = path.partition(":")
    actual = " ".join(inspect.signature(getattr(getattr(import_module(module), owner), method)).parameters)
    since = max(v for v in PARAMETERS[name] if compat.released(v) <= VERSION)
    known = PARAMETERS[name][since]
    assert actual == known, (
        f"{owner}.{method} of vLLM {vllm.__version__}, against what it was from {since} on"
    )


@pytest.mark.parametrize("name", ALTERNATIVES)
def test_an_alternative_is_where_it_is_known(engine, name):
    since, until = (compat.released(version) for version in ALTERNATIVES[name])
    known = since <= VERSION <= until
    assert hasattr(engine.scheduler, name) == known, f"{name} of {vllm.__version__}"


# --- what the names mean -----------------------------------------------------------------------------


def test_the_block_pool_counts_its_blocks(engine):
    pool = engine.scheduler.kv_cache_manager.block_pool
    # vLLM keeps one null block for itself.
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_the_kv_cache_manager_counts_the_blocks_of_a_request(engine):
    manager = engine.scheduler.kv_cache_manager
    assert callable(manager.coordinator.get_num_blocks_to_allocate)
    assert [group.block_size for group in manager.coordinator.single_type_managers] == [16]
    assert len(manager.empty_kv_cache_blocks.blocks) == 1


@pytest.mark.parametrize("name", compat.NAMES["vllm.v1.request:RequestStatus"])
def test_a_status_says_whether_a_request_is_over(name):
    assert RequestStatus.is_finished(RequestStatus[name]) == name.startswith("FINISHED")


def test_an_ended_request_is_named_between_the_steps():
    engine = VirtualEngine(Scheduler)
    engine.submit("ended", 5, 1)
    engine.step()
    assert "ended" in engine.scheduler.finished_req_ids


def test_our_queue_has_every_method_of_vllms():
    assert all(callable(getattr(BatchJobQueue, name, None)) for name in RequestQueue.__abstractmethods__)


def test_an_output_is_made_of():
    fields = {*EngineCoreOutput.__struct_fields__}
    assert {*compat.NAMES["vllm.v1.engine:EngineCoreOutput"]} <= fields
    assert EngineCoreOutputs().outputs == []
    assert str(FinishReason.ERROR) == "error"


# --- a vLLM that is not supported ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def start(model):
    return lambda **options: EngineArgs(model=model, **options).create_engine_config()


BY_NAME = {"scheduler_cls": "batchjob_scheduler.scheduler.BatchJobAwareScheduler"}


@pytest.mark.parametrize("switched_on", [{"additional_config": ON}, BY_NAME], ids=["section", "class"])
def test_a_name_that_is_gone_ends_the_start_with_one_sentence(start, switched_on, monkeypatch):
    monkeypatch.delattr(Scheduler, "finish_requests")
    with pytest.raises(
        UnsupportedEngineError, match=r"vLLM .*, which lacks Scheduler\.finish_requests; with"
    ):
        start(**switched_on)


@pytest.mark.parametrize("additional_config", [{}, OFF], ids=["no section", "switched off"])
def test_an_unsupported_vllm_starts_with_its_own_scheduler(start, additional_config, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.22.1")
    monkeypatch.delattr(Scheduler, "finish_requests")
    assert start(additional_config=additional_config).scheduler_config.scheduler_cls is None


def test_an_older_vllm_ends_the_start_whatever_it_has(start, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.22.1")
    with pytest.raises(UnsupportedEngineError, match=r"this is vLLM 0\.22\.1, which is too old; with"):
        start(additional_config=ON)


def test_the_class_itself_looks_where_the_plug_in_is_left_out(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.22.1")
    with pytest.raises(UnsupportedEngineError):
        VirtualEngine(BatchJobAwareScheduler, EngineOptions())


@pytest.mark.parametrize("version", ["99.0.0", "0.1.dev1+g0123abc", "dev"])
def test_a_vllm_that_was_not_tested_and_has_all_names_works_with_a_warning(version, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", version)
    warnings = []
    monkeypatch.setattr(scheduler.logger, "warning", lambda text, *values: warnings.append(text % values))
    engine = VirtualEngine(BatchJobAwareScheduler, EngineOptions())
    engine.submit("answered", 5, 2)
    engine.run()
    engine.check_integrity()
    assert [warning.split(",")[0] for warning in warnings] == [f"vLLM {version} was not tested"]

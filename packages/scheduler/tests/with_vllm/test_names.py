"""Each name of vLLM that the scheduler reads or calls, so that a change of one is told by its name."""

from __future__ import annotations

import inspect

import pytest
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from batchjob_scheduler.queue import BatchJobQueue
from batchjob_testkit.vllm_scheduler import EngineOptions, VirtualEngine

pytestmark = pytest.mark.vllm

SCHEDULER_ATTRIBUTES = (
    "finished_req_ids",
    "max_model_len",
    "max_num_scheduled_tokens",
    "num_lookahead_tokens",
    "running",
    "scheduler_config",
    "vllm_config",
    "waiting",
)
SCHEDULER_METHODS = (
    "finish_requests",
    "has_unfinished_requests",
    "schedule",
    "shutdown",
    "update_from_output",
)
REQUEST_ATTRIBUTES = (
    "client_index",
    "max_tokens",
    "num_computed_tokens",
    "num_output_placeholders",
    "num_output_tokens",
    "num_preemptions",
    "num_prompt_tokens",
    "num_tokens",
    "pooling_params",
    "priority",
    "request_id",
    "sampling_params",
    "status",
    "trace_headers",
)
SAMPLING_ATTRIBUTES = ("extra_args", "min_tokens", "stop")
STATUSES = (
    "FINISHED_ABORTED",
    "FINISHED_ERROR",
    "FINISHED_LENGTH_CAPPED",
    "FINISHED_REPETITION",
    "FINISHED_STOPPED",
)


@pytest.fixture(scope="module")
def engine():
    return VirtualEngine(Scheduler, EngineOptions())


@pytest.mark.parametrize("name", SCHEDULER_ATTRIBUTES)
def test_the_scheduler_has(engine, name):
    assert hasattr(engine.scheduler, name)


@pytest.mark.parametrize("name", SCHEDULER_METHODS)
def test_the_scheduler_does(name):
    assert callable(getattr(Scheduler, name))


def test_the_block_pool_counts_its_blocks(engine):
    pool = engine.scheduler.kv_cache_manager.block_pool
    # vLLM keeps one null block for itself.
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_the_kv_cache_manager_counts_the_blocks_of_a_request(engine):
    manager = engine.scheduler.kv_cache_manager
    assert callable(manager.coordinator.get_num_blocks_to_allocate)
    assert [group.block_size for group in manager.coordinator.single_type_managers] == [16]
    assert len(manager.empty_kv_cache_blocks.blocks) == 1


@pytest.mark.parametrize("name", REQUEST_ATTRIBUTES)
def test_a_request_has(engine, name):
    request = engine.submit(f"has {name}", 5, 5)
    assert hasattr(request, name)


@pytest.mark.parametrize("name", SAMPLING_ATTRIBUTES)
def test_sampling_parameters_have(engine, name):
    assert hasattr(engine.submit(f"samples {name}", 5, 5).sampling_params, name)


@pytest.mark.parametrize("name", STATUSES)
def test_a_status_is_named(name):
    assert RequestStatus[name] > RequestStatus.PREEMPTED


def test_an_ended_request_is_named_between_the_steps():
    engine = VirtualEngine(Scheduler)
    engine.submit("ended", 5, 1)
    engine.step()
    assert "ended" in engine.scheduler.finished_req_ids


def test_our_queue_has_every_method_of_vllms():
    missing = {
        name
        for name in RequestQueue.__abstractmethods__
        if inspect.signature(getattr(RequestQueue, name)) and not callable(getattr(BatchJobQueue, name, None))
    }
    assert not missing


def test_an_output_is_made_of():
    fields = {*EngineCoreOutput.__struct_fields__}
    assert {"request_id", "new_token_ids", "finish_reason", "stop_reason", "events"} <= fields
    assert "pooling_output" in fields
    assert EngineCoreOutputs().outputs == []
    assert str(FinishReason.ERROR) == "error"

"""What differs between the versions of vLLM, and whether the one that is there is supported.

Whatever is private or unstable in vLLM and used here is named in :data:`NAMES`. A difference is told by
what the engine offers, not by its version; the version is compared only where nothing else shows that it
is too old. Nothing of vLLM is imported before it is asked for.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, Final

from batchjob_scheduler.config import SECTION

OLDEST: Final = "0.23.0"
"""The oldest vLLM that is tested, with which the stable vllm-ascend goes."""

NEWEST: Final = "0.33.0"
"""The newest vLLM that is tested."""

NAMES: Final = {
    "vllm.config:DeviceConfig": ("device_type",),
    "vllm.config:ParallelConfig": ("data_parallel_rank", "data_parallel_size"),
    "vllm.config:SchedulerConfig": ("async_scheduling", "enable_chunked_prefill", "policy", "scheduler_cls"),
    "vllm.config:VllmConfig": (
        "additional_config",
        "device_config",
        "parallel_config",
        "scheduler_config",
    ),
    "vllm.engine.arg_utils:EngineArgs": ("additional_config", "create_engine_config", "scheduler_cls"),
    "vllm.logger:init_logger": (),
    "vllm.sampling_params:SamplingParams": ("extra_args", "min_tokens", "seed", "stop"),
    "vllm.v1.core.block_pool:BlockPool": ("get_num_free_blocks", "num_gpu_blocks"),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": (
        "get_num_blocks_to_allocate",
        "single_type_managers",
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": (
        "block_pool",
        "coordinator",
        "empty_kv_cache_blocks",
        "enable_caching",
    ),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": (),
    "vllm.v1.core.sched.output:NewRequestData": ("num_computed_tokens", "req_id"),
    "vllm.v1.core.sched.output:SchedulerOutput": ("num_scheduled_tokens", "scheduled_new_reqs"),
    "vllm.v1.core.sched.request_queue:RequestQueue": (),
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "_preempt_request",
        "add_request",
        "connector",
        "finish_requests",
        "finished_req_ids",
        "has_unfinished_requests",
        "kv_cache_manager",
        "kv_holding_waiting|_select_waiting_queue_for_scheduling",
        "kv_holding_waiting|skipped_waiting",
        "max_model_len",
        "max_num_running_reqs",
        "max_num_scheduled_tokens",
        "num_lookahead_tokens",
        "num_spec_tokens",
        "running",
        "schedule",
        "scheduler_config",
        "shutdown",
        "update_from_output",
        "vllm_config",
        "waiting",
    ),
    "vllm.v1.engine:EngineCoreOutput": (
        "events",
        "finish_reason",
        "new_token_ids",
        "pooling_output",
        "request_id",
        "stop_reason",
        "trace_headers",
    ),
    "vllm.v1.engine:EngineCoreOutputs": ("outputs",),
    "vllm.v1.engine:FinishReason": ("ERROR",),
    "vllm.v1.engine.async_llm:AsyncLLM": ("generate",),
    "vllm.v1.request:Request": (
        "client_index",
        "max_tokens",
        "num_computed_tokens",
        "num_output_placeholders",
        "num_output_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "num_tokens_with_spec",
        "pooling_params",
        "priority",
        "request_id",
        "sampling_params",
        "status",
        "take_events",
        "trace_headers",
    ),
    "vllm.v1.request:RequestStatus": (
        "FINISHED_ABORTED",
        "FINISHED_ERROR",
        "FINISHED_LENGTH_CAPPED",
        "FINISHED_REPETITION",
        "FINISHED_STOPPED",
        "WAITING_FOR_REMOTE_KVS",
    ),
}
"""The names of vLLM that the scheduler and its plug-in use; of names with a bar between one is needed."""


class UnsupportedEngineError(RuntimeError):
    """This vLLM is not supported; the message says what it lacks, what is supported, and how to go on."""

    def __init__(self, version: str, lack: str) -> None:
        super().__init__(
            f"{SECTION} needs a vLLM of {OLDEST} to {NEWEST}, and this is vLLM {version}, {lack}; "
            f"with {SECTION}.enabled: false, and without --scheduler-cls, vLLM's own scheduler starts"
        )


def check_engine() -> str | None:
    """Whether the vLLM that is there is supported; returns a warning if it is one that was not tested.

    Raises:
        UnsupportedEngineError: if it is too old or lacks a name.
    """
    version = str(import_module("vllm").__version__)
    release = released(version)
    if release and release < released(OLDEST):
        raise UnsupportedEngineError(version, "which is too old")
    missing = missing_names()
    if missing:
        raise UnsupportedEngineError(version, f"which lacks {', '.join(missing)}")
    if not release or release > released(NEWEST):
        return f"vLLM {version} was not tested, {OLDEST} to {NEWEST} were; it has all that is needed"
    return None


def released(version: str) -> tuple[int, ...]:
    """The numbers of a released version; none for a build from an unreleased commit.

    >>> released("0.23.0+cpu"), released("0.1.dev1+g0123abc"), released("dev")
    ((0, 23, 0), (), ())
    """
    numbers = re.match(r"\d+(\.\d+)*", version)
    return () if numbers is None or "dev" in version else tuple(map(int, numbers[0].split(".")))


def missing_names() -> list[str]:
    """Those of :data:`NAMES` that this vLLM does not have."""
    return [name for where, names in NAMES.items() for name in _missing(where, names)]


def _missing(where: str, names: Iterable[str]) -> Iterator[str]:
    module, _, owner_name = where.partition(":")
    try:
        owner = getattr(import_module(module), owner_name)
    except (ImportError, AttributeError):
        yield f"{module}.{owner_name}"
        return
    for name in names:
        if not any(offers(owner, either) for either in name.split("|")):
            yield f"{owner_name}.{name.replace('|', ' or ')}"


def offers(owner: type, name: str) -> bool:
    """Whether the instances of a class have an attribute, as far as the class tells."""
    inherited = getattr(owner, name, owner)
    if inherited is not owner and not getattr(inherited, "__isabstractmethod__", False):
        return True
    return any(
        name in vars(base).get("__annotations__", ()) or name in _assigned_by(vars(base).get("__init__"))
        for base in owner.__mro__
    )


@cache
def _assigned_by(constructor: Any) -> set[str]:
    code = getattr(inspect.unwrap(constructor), "__code__", None) if constructor else None
    steps = dis.get_instructions(code) if code else ()
    return {step.argval for step in steps if step.opname == "STORE_ATTR"}


def take_over_waiting(scheduler: Any, queue: Any) -> Any:
    """Let ``queue`` hold what waits; returns the engine's own queue of what holds KV blocks meanwhile.

    From 0.31 on, vLLM keeps only the latter apart, and serves it first. Before, it had a second queue for all
    that was not ready when it was looked at (for a grammar, an adapter), served first, whatever fitted; and
    under a priority policy what holds blocks waited for what is more urgent, which may need those blocks.
    """
    scheduler.waiting = queue
    if hasattr(scheduler, "kv_holding_waiting"):
        return scheduler.kv_holding_waiting
    kind = type(scheduler.skipped_waiting)
    scheduler.skipped_waiting = type("KVHoldingQueue", (_KVHolding, kind), {})()
    scheduler.skipped_waiting.scheduler = scheduler
    holders_first = {
        "_select_waiting_queue_for_scheduling": lambda: scheduler.skipped_waiting or scheduler.waiting
    }
    vars(scheduler).update(holders_first)
    return scheduler.skipped_waiting


class _KVHolding:
    """Over a queue class of vLLM: keeps what holds KV blocks, hands on the rest to ``scheduler.waiting``."""

    scheduler: Any

    def add_request(self, request: Any) -> None:
        if _holds_kv_blocks(request):
            super().add_request(request)  # type: ignore[misc]
        else:
            self.scheduler.waiting.add_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        skipped = list(requests)
        super().prepend_requests([request for request in skipped if _holds_kv_blocks(request)])  # type: ignore[misc]
        rest = [request for request in skipped if not _holds_kv_blocks(request)]
        self.scheduler.waiting.prepend_requests(rest)


def _holds_kv_blocks(request: Any) -> bool:
    # While blocks are loaded from elsewhere none of their tokens need be counted yet.
    return bool(request.num_computed_tokens or request.status.name == "WAITING_FOR_REMOTE_KVS")

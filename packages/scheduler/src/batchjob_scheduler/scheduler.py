"""The scheduler classes that run inside vLLM.

They replace the waiting queue of vLLM's own scheduler and leave its ``schedule()`` as it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from batchjob_scheduler.compat import check_engine, take_over_waiting
from batchjob_scheduler.config import settings_of
from batchjob_scheduler.kv_pool import KVPool
from batchjob_scheduler.pacing import step_tokens
from batchjob_scheduler.plugin import doubt_about_the_class, doubt_about_the_filter
from batchjob_scheduler.queue import BatchJobQueue
from batchjob_scheduler.report import Report

# vLLM configures the logger "vllm" and those below it.
logger = init_logger("vllm.batchjob")

REPORT_VARIABLE: Final = "BATCHJOB_REPORT"
"""Names a file: whenever the engine runs out of work, the report is written there as JSON."""

_SECONDS_BETWEEN_REPORTS: Final = 10.0

_ENDED_BY_ITSELF: Final = frozenset(
    {
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_REPETITION,
    }
)

_READY: Final = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED})

RequestQueue.register(BatchJobQueue)


class _EngineView:
    """The scheduler that we are part of, as the queue sees it."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.pool = KVPool(scheduler)
        self.block_size = self.pool.block_size
        self.max_request_tokens = self.pool.max_request_tokens
        self.step_tokens: int = scheduler.max_num_scheduled_tokens
        slots: int = scheduler.max_num_running_reqs
        # From 0.32 on fewer may be admitted than there are slots.
        self.max_running: int = getattr(scheduler, "max_num_active_reqs", slots)
        self.lookahead_tokens: int = scheduler.num_lookahead_tokens

    def free_blocks(self) -> int:
        # The watermark is kept free while others run; not every version has one.
        watermark = getattr(self._scheduler.kv_cache_manager, "watermark_blocks", 0)
        return self.pool.free_blocks(kept_free=watermark if self._scheduler.running else 0)

    def running(self) -> Sequence[Request]:
        running: Sequence[Request] = self._scheduler.running
        return running


# Any, since the base is one of vLLM's classes or of a platform's, in whichever version is there.
_SomeScheduler: Any = object


class _BatchJobAware(_SomeScheduler):
    """What both scheduler classes add to vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        untested = check_engine()
        super().__init__(*args, **kwargs)
        config = settings_of(self.vllm_config)
        self._engine_view = _EngineView(self)
        self._queue = BatchJobQueue(
            config,
            self._engine_view,
            priority_policy=self.scheduler_config.policy == "priority",
        )
        self._kv_holding = take_over_waiting(self, self._queue)
        self._outgrown: dict[Any, int] = {}
        # A prompt that is not cut into chunks needs the whole budget.
        self._shapes_steps = config.step_shaping and self.scheduler_config.enable_chunked_prefill
        # After a part of a prompt vLLM winds its generator back, and torch's for the CPU cannot be.
        self._can_cut_seeded_prompts = self.vllm_config.device_config.device_type != "cpu"
        self._steps = 0
        self._last_report_seconds: float | None = None
        self._unreported_ends = 0
        logger.info("Batch-job-aware scheduler is on (%s): %s", type(self).__name__, config)
        misfit = doubt_about_the_class(
            type(self).__name__,
            is_made_for_async=isinstance(self, AsyncScheduler),
            is_async=bool(self.scheduler_config.async_scheduling),
        )
        for doubt in (untested, misfit, doubt_about_the_filter()):
            if doubt is not None:
                logger.warning("%s", doubt)

    def add_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Take a request; where a prompt with a seed must not be cut, the first one ends all step shaping."""
        super().add_request(request, *args, **kwargs)
        if self._can_cut_seeded_prompts or not self._shapes_steps:
            return
        if getattr(request.sampling_params, "seed", None) is not None:
            self._shapes_steps = False
            self.max_num_scheduled_tokens = self._engine_view.step_tokens
            logger.warning("request %s has a seed: steps are not shaped from here on", request.request_id)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step of vLLM's scheduler, over a queue that knows what has ended since the last."""
        self._settle_ended_requests()
        self._queue.begin_step()
        try:
            if self._shapes_steps:
                tokens_per_decode = 1 + self.num_spec_tokens
                self.max_num_scheduled_tokens = step_tokens(self._queue, self._engine_view, tokens_per_decode)
            output = super().schedule(*args, **kwargs)
        finally:
            self._queue.end_step()
        self._count_step(output.num_scheduled_tokens)
        # What a connector found elsewhere takes blocks of its own here.
        if self.connector is None:
            for started in output.scheduled_new_reqs:
                self._queue.found_in_cache(started.req_id, started.num_computed_tokens)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        """Take in what the model computed; end what can never be served (P2)."""
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(*args, **kwargs)
        for request, tokens in self._unservable().items():
            self._fail(request, tokens, outputs)
        self._settle_ended_requests()
        if self._unreported_ends and not self.has_unfinished_requests():
            self._report()
        return outputs

    def shutdown(self) -> None:
        """Report what was not reported yet, and let the engine shut down."""
        self._last_report_seconds = None
        if self._unreported_ends:
            self._report()
        super().shutdown()

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        tokens = request.num_tokens_with_spec + request.num_output_placeholders
        super()._preempt_request(request, *args, **kwargs)
        # Where a KV connector hands blocks on, vLLM 0.27 drops the output in flight: if there is no room for
        # it in the whole pool, the request is computed again up to there, and again, for ever.
        handed_on = getattr(self, "requires_kv_delivery", False)
        drops = handed_on and getattr(request, "num_stale_output_tokens", 0)
        if drops and tokens > self._engine_view.max_request_tokens:
            self._outgrown[request] = tokens

    def _unservable(self) -> dict[Request, int]:
        """What can never be served, and its tokens, which are more than the whole pool holds (P2)."""
        most = self._engine_view.max_request_tokens
        outgrown, self._outgrown = self._outgrown, {}
        holders = [r for r in self._kv_holding if r.status in _READY and r.num_tokens > most]
        too_large = {
            cast("Request", request): request.num_tokens
            for request in [*self._queue.unservable(), *holders]
            # Output that is still in flight may end it regularly.
            if not getattr(request, "num_in_flight_tokens", 0)
        }
        return too_large | {r: tokens for r, tokens in outgrown.items() if r.status in _READY}

    def _settle_ended_requests(self) -> None:
        # The set has no order of its own, and the average depends on the order of what it learns (Q5).
        for request in self._queue.live_requests(self.finished_req_ids):
            if _has_ended(request):  # and is no new request under the ID of one that ended
                self._queue.end(request.request_id, by_itself=_has_ended_by_itself(request))
                self._unreported_ends += 1

    def _count_step(self, num_scheduled_tokens: dict[str, int]) -> None:
        if num_scheduled_tokens:
            self._steps += 1
            for job in self._queue.jobs:
                job.steps += job.running > 0

    def _fail(self, request: Request, tokens: int, outputs: dict[int, EngineCoreOutputs]) -> None:
        pool = self._engine_view.pool
        reason = (
            f"request {request.request_id} needs {pool.blocks_for(tokens)} "
            f"KV cache blocks for its {tokens} tokens, "
            f"the whole pool has {pool.usable_blocks} of {pool.block_size} tokens"
        )
        logger.error("%s: it is ended with an error, the others go on.", reason)
        self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
        of_client.outputs.append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=FinishReason.ERROR,
                stop_reason=reason,
                # The front end of a pooling model takes any end for an answer with a tensor.
                pooling_output=torch.empty(0) if request.pooling_params else None,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
        )

    def _report(self) -> None:
        report = Report.of(self._queue.jobs, steps=self._steps, forgotten_jobs=self._queue.jobs.forgotten)
        now = time.monotonic()
        last = self._last_report_seconds
        if last is None or now - last >= _SECONDS_BETWEEN_REPORTS:
            self._last_report_seconds = now
            self._unreported_ends = 0
            for line in report.log_lines():
                logger.info("%s", line)
        path = os.environ.get(REPORT_VARIABLE)
        if path:
            try:
                report.write(self._report_path(path))
            except OSError as error:
                logger.warning("%s=%s cannot be written: %s", REPORT_VARIABLE, path, error)

    def _report_path(self, path: str) -> Path:
        # Each rank of a data-parallel engine has a scheduler of its own.
        parallel = self.vllm_config.parallel_config
        if parallel.data_parallel_size > 1:
            path = f"{path}.{parallel.data_parallel_rank}"
        return Path(path)


def _has_ended(request: Any) -> bool:
    return bool(RequestStatus.is_finished(request.status))


def _has_ended_by_itself(request: Any) -> bool:
    if request.status in _ENDED_BY_ITSELF:
        return True
    # Stop strings are found by the front end, which then aborts the request here.
    stop = getattr(request.sampling_params, "stop", None)
    return bool(request.status == RequestStatus.FINISHED_ABORTED and stop and request.num_output_tokens)


class BatchJobAwareScheduler(_BatchJobAware, Scheduler):
    """vLLM's scheduler over a waiting queue that knows batch jobs."""


class BatchJobAwareAsyncScheduler(_BatchJobAware, AsyncScheduler):
    """The same for async scheduling, which vLLM turns off under any other class."""

"""The production schedulers satisfy the scheduler contract inside vLLM, synchronous and asynchronous."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from batchjob_scheduler.scheduler import BatchJobAwareAsyncScheduler, BatchJobAwareScheduler
from batchjob_testkit.scheduler_contracts import SchedulerContract
from batchjob_testkit.vllm_scheduler import EngineOptions, VirtualEngine

pytestmark = pytest.mark.vllm


class TestBatchJobAwareScheduler(SchedulerContract):
    @pytest.fixture
    def make_engine(self):
        return lambda limits: VirtualEngine(BatchJobAwareScheduler, EngineOptions(**asdict(limits)))


class TestBatchJobAwareAsyncScheduler(SchedulerContract):
    @pytest.fixture
    def make_engine(self):
        return lambda limits: VirtualEngine(
            BatchJobAwareAsyncScheduler, EngineOptions(**asdict(limits), async_scheduling=True)
        )

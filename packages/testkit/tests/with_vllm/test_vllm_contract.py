"""vLLM's own schedulers satisfy the scheduler contract, but for what can never fit (P2)."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from batchjob_testkit.scheduler_contracts import SchedulerContract
from batchjob_testkit.vllm_scheduler import EngineOptions, VirtualEngine

pytestmark = pytest.mark.vllm


class TestScheduler(SchedulerContract):
    claims_p2 = False

    @pytest.fixture
    def make_engine(self):
        return lambda limits: VirtualEngine(Scheduler, EngineOptions(**asdict(limits)))


class TestAsyncScheduler(SchedulerContract):
    claims_p2 = False

    @pytest.fixture
    def make_engine(self):
        return lambda limits: VirtualEngine(
            AsyncScheduler, EngineOptions(**asdict(limits), async_scheduling=True)
        )

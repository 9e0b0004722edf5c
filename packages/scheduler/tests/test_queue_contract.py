"""The production queue satisfies the contract, lockstep with the specification included."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from batchjob_scheduler.config import BatchJobConfig
from batchjob_scheduler.queue import BatchJobQueue
from batchjob_spec.queue import Settings
from batchjob_testkit.contracts import QueueContract
from batchjob_testkit.fakes import FakeEngine
from batchjob_testkit.stateful import QueueFactory


def production_queue(engine: FakeEngine, settings: Settings, priority_policy: bool) -> BatchJobQueue:
    return BatchJobQueue(BatchJobConfig(**asdict(settings)), engine, priority_policy=priority_policy)


class TestBatchJobQueue(QueueContract):
    @pytest.fixture
    def make_queue(self) -> QueueFactory:
        return production_queue

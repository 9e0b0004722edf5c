"""The specification satisfies its own contract."""

from __future__ import annotations

import pytest

from batchjob_testkit.contracts import QueueContract
from batchjob_testkit.queues import SpecQueue
from batchjob_testkit.stateful import QueueFactory


class TestSpecQueue(QueueContract):
    @pytest.fixture
    def make_queue(self) -> QueueFactory:
        return lambda engine, settings, policy: SpecQueue(engine, settings, priority_policy=policy)

"""The whole test of the toy: a class per contract, a fixture each."""

from __future__ import annotations

import pytest
from toy_scheduler import MovingAverage, ShortestPromptFirst

from batchjob_testkit.contracts import EstimatorContract, RequestQueueContract


class TestShortestPromptFirst(RequestQueueContract):
    @pytest.fixture
    def make_queue(self):
        return lambda engine, settings, priority_policy: ShortestPromptFirst()


class TestMovingAverage(EstimatorContract):
    @pytest.fixture
    def make_estimator(self):
        return MovingAverage

"""The specification satisfies its own contracts."""

from __future__ import annotations

import pytest

from batchjob_testkit.contracts import BlendingQueueContract, EstimatorContract, ReservationContract
from batchjob_testkit.estimators import EstimatorFactory, SpecEstimator
from batchjob_testkit.queues import SpecQueue
from batchjob_testkit.reservations import ReservationFactory, SpecReservation
from batchjob_testkit.stateful import QueueFactory


class TestSpecQueue(BlendingQueueContract):
    @pytest.fixture
    def make_queue(self) -> QueueFactory:
        return lambda engine, settings, policy: SpecQueue(engine, settings, priority_policy=policy)

    # With itself; its histories are in the specification's tests.
    test_lockstep_with_the_specification = None
    test_o5b_lockstep_with_what_the_specification_allows = None


class TestSpecEstimator(EstimatorContract):
    @pytest.fixture
    def make_estimator(self) -> EstimatorFactory:
        return SpecEstimator


class TestSpecReservation(ReservationContract):
    @pytest.fixture
    def make_reservation(self) -> ReservationFactory:
        return SpecReservation

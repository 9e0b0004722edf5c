"""The production classes satisfy the contracts, lockstep with the specification included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import pytest

from batchjob_scheduler.config import BatchJobConfig
from batchjob_scheduler.estimator import DecodeLengthEstimator, held_between, remaining_tokens
from batchjob_scheduler.queue import BatchJobQueue
from batchjob_scheduler.reservation import PredictedPeak, next_step_blocks
from batchjob_scheduler.running import Running
from batchjob_spec.queue import Settings
from batchjob_testkit.contracts import BlendingQueueContract, EstimatorContract, ReservationContract
from batchjob_testkit.estimators import EstimatorFactory
from batchjob_testkit.fakes import FakeEngine, FakeRequest
from batchjob_testkit.reservations import HeldAndRemaining, ReservationFactory
from batchjob_testkit.stateful import QueueFactory


def production_queue(engine: FakeEngine, settings: Settings, priority_policy: bool) -> BatchJobQueue:
    return BatchJobQueue(BatchJobConfig(**asdict(settings)), engine, priority_policy=priority_policy)


class ProductionEstimator:
    def __init__(self, alpha: float) -> None:
        self.estimator = DecodeLengthEstimator(alpha)
        self.observe = self.estimator.observe

    def predicted_tokens(self) -> int:
        return self.estimator.predicted_tokens

    def remaining_tokens(self, output_tokens: int, min_tokens: int, max_tokens: int) -> int:
        total = held_between(self.predicted_tokens(), min_tokens, max_tokens)
        return remaining_tokens(total, output_tokens)


class ProductionReservation:
    def __init__(self, engine: FakeEngine, settings: Settings) -> None:
        self.engine = engine
        self.config = BatchJobConfig(**asdict(settings))

    def next_step_blocks(self, request: FakeRequest) -> int:
        return next_step_blocks(request.num_tokens, request.num_computed_tokens, self.engine)

    def budget_tokens(self) -> int:
        running = Running(self.engine, self.config, end_of=lambda _: 1)
        running.look()
        return running.budget_blocks() * self.engine.block_size

    def predicted_peak_tokens(self, running: Sequence[HeldAndRemaining], candidate: HeldAndRemaining) -> int:
        peak = PredictedPeak()
        for held, remaining in running:
            peak.add([held], [remaining])
        held, remaining = candidate
        return held + peak.beside(remaining)


class TestBatchJobQueue(BlendingQueueContract):
    @pytest.fixture
    def make_queue(self) -> QueueFactory:
        return production_queue


class TestDecodeLengthEstimator(EstimatorContract):
    @pytest.fixture
    def make_estimator(self) -> EstimatorFactory:
        return ProductionEstimator


class TestReservation(ReservationContract):
    @pytest.fixture
    def make_reservation(self) -> ReservationFactory:
        return ProductionReservation

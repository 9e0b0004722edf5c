"""Deliberately naive implementations satisfy the contracts, without a line of the specification."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from batchjob_testkit.contracts import EstimatorContract, QueueContract, ReservationContract

sys.path.insert(0, str(Path(__file__).parent))
import naive  # the module beside this file


class TestNaiveQueue(QueueContract):
    @pytest.fixture
    def make_queue(self):
        return naive.NaiveQueue


class TestNaiveEstimator(EstimatorContract):
    @pytest.fixture
    def make_estimator(self):
        return naive.NaiveEstimator


class TestNaiveReservation(ReservationContract):
    @pytest.fixture
    def make_reservation(self):
        return naive.NaiveReservation


def test_the_naive_share_nothing_with_the_specification():
    assert "batchjob" not in Path(naive.__file__).read_text(encoding="utf-8")

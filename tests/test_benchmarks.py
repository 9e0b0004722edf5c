"""The tables of the benchmark, from runs whose figures are easy to average."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "benchmarks" / "tables.py"


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("benchmark_tables", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures(tables):
    """Two workloads and seeds; the bound is 50 s. FCFS takes 100 s, but 60 s with the small budget on b."""
    seconds = {
        ("FCFS", "a"): (90, 110),
        ("FCFS", "b"): (100, 100),
        ("small", "a"): (120, 120),
        ("small", "b"): (60, 60),
        ("oracle", "a"): (55, 55),
        ("oracle", "b"): (55, 55),
        ("ours", "a"): (72, 88),
        ("ours", "b"): (75, 75),
        ("without", "a"): (90, 110),
        ("without", "b"): (60, 60),
    }
    rows = [
        {
            **dict.fromkeys((figure for _, figure, _ in tables.OTHER_FIGURES), 1.0),
            "policy": policy,
            "workload": workload,
            "timing": "serial",
            "seed": seed,
            "makespan_seconds": makespan,
            "bound_seconds": 50,
            "ratio_to_bound": makespan / 50,
            "preemptions": 40 if policy == "FCFS" else 3,
        }
        for (policy, workload), makespans in seconds.items()
        for seed, makespan in enumerate(makespans)
    ]
    roles = tables.Roles(
        kinds={
            "FCFS": "peer",
            "small": "peer",
            "oracle": "clairvoyant",
            "ours": "ours",
            "without": "ablation",
        },
        first="FCFS",
        ours="ours",
        tuned="tuned",
        tuned_from=("FCFS", "small"),
        ablations={"key": "without", "other": "not run"},
    )
    return tables.Figures(rows, roles)


def test_the_tuned_policy_is_the_best_on_each_workload(figures):
    assert figures.mean("tuned", "a", "serial", "makespan_seconds") == 100
    assert figures.mean("tuned", "b", "serial", "makespan_seconds") == 60


def test_a_ratio_is_between_runs_of_one_seed(figures):
    assert figures.ratio("ours", "a", "serial", "FCFS") == pytest.approx(0.8)
    assert figures.ratio("ours", "b", "serial", "tuned") == pytest.approx(1.25)


def test_the_gap_closed_is_the_share_of_the_way_from_fcfs_to_the_bound(figures):
    assert figures.gap_closed("FCFS", "a", "serial") == 0
    assert figures.gap_closed("ours", "a", "serial") == pytest.approx(20 / 50)
    assert figures.gap_closed("small", "a", "serial") == pytest.approx(-20 / 50)


def test_the_best_peer_does_not_know_the_future_and_is_not_ours(figures):
    assert figures.best_peer("a", "serial") == "FCFS"
    assert figures.best_peer("b", "serial") in {"small", "tuned"}


def test_the_report_sums_up(tables, figures):
    lines = tables.report(figures, "One run.").splitlines()
    # The roots of 0.8 * 0.75 and of 0.8 * 1.25, the mean of 20 / 50 and 25 / 50, and 3 and 3.
    assert "| ours (ours) | 0.775 | 0.750 | 0.800 | 1.000 | 0.45 | 6 |" in lines
    assert "| b serial | 0.750 | 0.50 | 1.250 (small) | 1.364 | 40 | 3 |" in lines
    # Without the key: 1.25 times on a, 0.8 times on b.
    assert "| `key` | 1.000 | 1.250 (a serial) | 0.800 (b serial) |" in lines
    assert "| ours | 1.600 | 1.500 |" in lines
    assert "| ours | 0.800 | 0.750 | 0.775 |" in lines

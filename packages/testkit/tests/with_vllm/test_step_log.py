"""The log of steps says what each step computed, and a profile can be fitted to it."""

from __future__ import annotations

import pytest

from batchjob_testkit import vllm_step_log
from batchjob_testkit.simulator.fit import StepRow, read_step_log
from batchjob_testkit.vllm_scheduler import EngineOptions, VirtualEngine

pytestmark = pytest.mark.vllm


class Clock:
    """A second passes at each look."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1.0
        return self.now


@pytest.mark.parametrize(
    ("scheduler", "asynchronous"),
    [(vllm_step_log.StepLogScheduler, False), (vllm_step_log.StepLogAsyncScheduler, True)],
)
def test_each_step_that_another_follows_is_a_row(tmp_path, monkeypatch, scheduler, asynchronous):
    file = tmp_path / "steps.csv"
    monkeypatch.setenv(vllm_step_log.STEP_LOG_VARIABLE, str(file))
    monkeypatch.setattr(vllm_step_log, "time", Clock())
    engine = VirtualEngine(scheduler, EngineOptions(async_scheduling=asynchronous))
    engine.submit("1", 20, 3)
    engine.submit("2", 10, 2)
    engine.run()
    # 20 and 10 tokens of prompt, then a token each, over what is computed before and with them. The last
    # step of request 1, and what follows it, has no end that is seen.
    assert read_step_log(file)[:2] == [StepRow(30, 30, 1.0), StepRow(2, 32, 1.0)]
    engine.submit("3", 5, 2)
    engine.run()
    assert StepRow(5, 5, 1.0) in read_step_log(file)
    assert all(row.seconds == 1.0 for row in read_step_log(file))

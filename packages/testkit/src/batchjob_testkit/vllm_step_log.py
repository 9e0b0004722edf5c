"""vLLM's own schedulers, which besides write what each step was and how long it took.

``--scheduler-cls batchjob_testkit.vllm_step_log.StepLogScheduler`` (with async scheduling
``StepLogAsyncScheduler``) and ``BATCHJOB_STEP_LOG=steps.csv`` in the environment make the log from which
the simulator fits a profile of the device. Needs vLLM.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from batchjob_testkit.simulator.fit import COLUMNS

STEP_LOG_VARIABLE: Final = "BATCHJOB_STEP_LOG"
"""Names the file that is written."""

# Any, since the base is one of vLLM's classes, in whichever version is there.
_SomeScheduler: Any = object


class _StepLog(_SomeScheduler):
    """A row for each step that another one follows, since only then its end is seen."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._log = Path(os.environ[STEP_LOG_VARIABLE]).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115 - for as long as the engine runs
        self._log.write(",".join(COLUMNS) + "\n")
        self._last_step: tuple[float, int, int] | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """A step; the last one has just ended."""
        start = time.perf_counter()
        if self._last_step is not None:
            began, tokens, context_tokens = self._last_step
            self._log.write(f"{tokens},{context_tokens},{start - began:.6f}\n")
        output = super().schedule(*args, **kwargs)
        scheduled: dict[str, int] = output.num_scheduled_tokens
        context_tokens = sum(self.requests[name].num_computed_tokens for name in scheduled)
        self._last_step = (start, sum(scheduled.values()), context_tokens) if scheduled else None
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """What was computed; if nothing is left to do, the next step may come any time later."""
        outputs = super().update_from_output(*args, **kwargs)
        if not self.has_unfinished_requests():
            self._last_step = None
        return outputs

    def shutdown(self) -> None:
        """The log ends with the engine."""
        self._log.close()
        super().shutdown()


class StepLogScheduler(_StepLog, Scheduler):
    """First come, first served, with a log of its steps."""


class StepLogAsyncScheduler(_StepLog, AsyncScheduler):
    """The same for async scheduling."""

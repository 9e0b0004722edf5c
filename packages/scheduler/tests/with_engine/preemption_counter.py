"""vLLM's own scheduler, which besides notes each preemption in a file: the engine's word for it."""

from __future__ import annotations

import os
from pathlib import Path

from vllm.v1.core.sched.scheduler import Scheduler


class CountingScheduler(Scheduler):
    """Appends a line to the file that ``PREEMPTIONS`` names whenever it preempts a request."""

    def _preempt_request(self, request, *args, **kwargs):
        with Path(os.environ["PREEMPTIONS"]).open("a", encoding="utf-8") as file:
            file.write(f"{request.request_id}\n")
        super()._preempt_request(request, *args, **kwargs)

"""vLLM's own first-come-first-served queue keeps the rules that it claims."""

from __future__ import annotations

import pytest
from vllm.v1.core.sched.request_queue import FCFSRequestQueue

from batchjob_testkit.contracts import RequestQueueContract

pytestmark = pytest.mark.vllm


class TestFCFSRequestQueue(RequestQueueContract):
    @pytest.fixture
    def make_queue(self):
        return lambda *_: FCFSRequestQueue()

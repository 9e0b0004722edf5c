"""Stand-ins for the parts of vLLM that a waiting queue and a scheduler touch."""

from batchjob_testkit.fakes.block_pool import FakeBlockPool
from batchjob_testkit.fakes.engine import FakeEngine
from batchjob_testkit.fakes.engine_core import FakeEngineCore
from batchjob_testkit.fakes.fcfs_queue import FCFSQueue
from batchjob_testkit.fakes.kv_cache_manager import BlockIds, FakeKVCacheManager
from batchjob_testkit.fakes.request import FakeRequest, FakeSamplingParams

__all__ = [
    "BlockIds",
    "FCFSQueue",
    "FakeBlockPool",
    "FakeEngine",
    "FakeEngineCore",
    "FakeKVCacheManager",
    "FakeRequest",
    "FakeSamplingParams",
]

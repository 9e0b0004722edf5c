"""The fake KV cache manager and vLLM's real one do the same, block for block, over the same histories."""

from __future__ import annotations

from functools import cache

import pytest

from batchjob_testkit.fakes import BlockIds, FakeRequest
from batchjob_testkit.kv_contracts import KVManagerContract
from batchjob_testkit.kv_ledger import KVCacheOptions, KVManagerFactory, make_fake_manager
from batchjob_testkit.vllm_kv_cache import VllmKVCacheManager

pytestmark = pytest.mark.vllm


@cache
def what_is_freed_last_is_reused_last(window, enable_caching):
    """Whether this vLLM reuses a block that caches nothing as the last, which few versions do."""
    options = KVCacheOptions(num_gpu_blocks=4, sliding_windows=(window,), enable_caching=enable_caching)
    real = VllmKVCacheManager(options)
    request = FakeRequest("1", 2, 1)
    ((block,),) = real.allocate_slots(request, 2)
    real.free(request)
    return real.free_order()[-1] == block


class LongestFreeFirst:
    """A pool, for those who give blocks back to be reused as the last."""

    def __init__(self, pool):
        self._pool = pool

    def __getattr__(self, name):
        return getattr(self._pool, name)

    def free_blocks(self, blocks):
        blocks = list(blocks)
        self._pool.free_blocks(blocks)
        for block in blocks:
            if block in self._pool._free:
                self._pool._free.move_to_end(block)


class BothManagers:
    """Calls both and compares what they answer, and which blocks are free, in the order of their reuse."""

    unclaimed = VllmKVCacheManager.unclaimed

    def __init__(self, options: KVCacheOptions) -> None:
        self.fake = make_fake_manager(options)
        for window, group in zip(options.sliding_windows, self.fake._groups, strict=True):
            if what_is_freed_last_is_reused_last(window, options.enable_caching):
                group._pool = LongestFreeFirst(group._pool)
        self.real = VllmKVCacheManager(options)
        self.block_pool = self.fake.block_pool

    def get_computed_blocks(self, request: FakeRequest) -> tuple[BlockIds, int]:
        return self._both("get_computed_blocks", request)

    def allocate_slots(self, request: FakeRequest, num_new_tokens: int, **options) -> BlockIds | None:
        return self._both("allocate_slots", request, num_new_tokens, **options)

    def free(self, request: FakeRequest) -> None:
        self._both("free", request)

    def get_block_ids(self, request_id: str) -> BlockIds:
        return self._both("get_block_ids", request_id)

    def _both(self, method: str, *args, **options):
        fake, real = (getattr(manager, method)(*args, **options) for manager in (self.fake, self.real))
        assert fake == real, f"{method}{args} {options}: the fake says {fake}, vLLM says {real}"
        self.compare_pools()
        return fake

    def compare_pools(self) -> None:
        self.fake.check_integrity()
        assert self.fake.block_pool.get_num_free_blocks() == self.real.block_pool.get_num_free_blocks()
        assert self.fake.block_pool.free_order() == self.real.free_order()


class TestFidelity(KVManagerContract):
    """Each history of the contract is run on both."""

    @pytest.fixture
    def make_manager(self) -> KVManagerFactory:
        return BothManagers


class TestVllmKVCacheManager(KVManagerContract):
    @pytest.fixture
    def make_manager(self) -> KVManagerFactory:
        return VllmKVCacheManager


def test_a_difference_is_seen():
    both = BothManagers(KVCacheOptions(num_gpu_blocks=4))
    both.fake.block_pool.get_new_blocks(1)
    with pytest.raises(AssertionError):
        both.compare_pools()
    with pytest.raises(AssertionError, match=r"the fake says .*, vLLM says"):
        both.allocate_slots(FakeRequest("1", 12, 1), 12)

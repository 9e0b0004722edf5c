"""The fake KV cache manager satisfies the contract, and its own books are whole."""

from __future__ import annotations

import pytest

from batchjob_testkit.kv_contracts import KVManagerContract
from batchjob_testkit.kv_ledger import KVManagerFactory, make_fake_manager


class TestFakeKVCacheManager(KVManagerContract):
    @pytest.fixture
    def make_manager(self) -> KVManagerFactory:
        return make_fake_manager

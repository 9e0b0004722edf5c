"""The contract of a KV cache manager rejects broken ones, each by the rule that it breaks."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

import pytest
from hypothesis import Phase
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import run_state_machine_as_test

from batchjob_testkit.fakes import FakeBlockPool, FakeKVCacheManager
from batchjob_testkit.fakes.kv_cache_group import FakeKVCacheGroup
from batchjob_testkit.kv_contracts import BLOCK, KVManagerContract, kv_histories, ledger_factory
from batchjob_testkit.kv_ledger import make_fake_manager


class LeaksOnFree(FakeKVCacheManager):
    def free(self, request):
        for group in self._groups:
            group.table(request.request_id)[-1:] = []
        super().free(request)


class OffByOneBlock(FakeKVCacheManager):
    def allocate_slots(self, request, num_new_tokens, *, num_lookahead_tokens=0, **options):
        more = num_lookahead_tokens + 1
        return super().allocate_slots(request, num_new_tokens, num_lookahead_tokens=more, **options)


class ForgetsLookahead(FakeKVCacheManager):
    def allocate_slots(self, request, num_new_tokens, **options):
        return super().allocate_slots(request, num_new_tokens, **options | {"num_lookahead_tokens": 0})


class IgnoresTheWholeSequence(FakeKVCacheManager):
    def _whole_sequence_fits(self, *_):
        return True


class AsksForMoreThanTheWindow(FakeKVCacheGroup):
    def blocks_needed_at_most(self, *arguments):
        return self.blocks_needed(*arguments)


class ChangesOnRefusal(FakeKVCacheManager):
    """Takes what is there, and gives it back only when the request ends."""

    def allocate_slots(self, request, num_new_tokens, **options):
        answer = super().allocate_slots(request, num_new_tokens, **options)
        if answer is None and self.get_block_ids(request.request_id)[0]:
            for group in self._groups:
                table = group.tables[request.request_id]
                table += self.block_pool.get_new_blocks(self.block_pool.get_num_free_blocks())
        return answer


class RefusesTheLastBlock(FakeKVCacheManager):
    def allocate_slots(self, request, num_new_tokens, **options):
        if self.block_pool.get_num_free_blocks() == 1:
            return None
        return super().allocate_slots(request, num_new_tokens, **options)


class SharesOnlyTheTokensOfABlock(FakeKVCacheManager):
    """The hash of a block forgets what comes before it."""

    def _block_hashes(self, request):
        tokens = request.all_token_ids
        starts = range(0, len(tokens) - self.block_size + 1, self.block_size)
        return [str(tokens[start : start + self.block_size]).encode() for start in starts]


class LeavesNoTokenToCompute(FakeKVCacheManager):
    def get_computed_blocks(self, request):
        longer = replace(request, num_output_tokens=request.num_output_tokens + 1, block_hashes=[])
        return super().get_computed_blocks(longer)


class SharesDrafts(FakeKVCacheManager):
    def _cache(self, request, _):
        drafted = replace(request, num_output_tokens=request.num_output_tokens + 2 * BLOCK, block_hashes=[])
        super()._cache(drafted, len(self.get_block_ids(request.request_id)[0]) * self.block_size)


class LastReuseFirst(FakeBlockPool):
    def get_new_blocks(self, num_blocks):
        self._free = type(self._free)((block, None) for block in reversed(self._free))
        blocks = super().get_new_blocks(num_blocks)
        self._free = type(self._free)((block, None) for block in reversed(self._free))
        return blocks


class HandsOutTheNullBlock(FakeBlockPool):
    def __init__(self, num_gpu_blocks):
        super().__init__(num_gpu_blocks)
        self._free[0] = None
        self._free.move_to_end(0, last=False)


class DoubleAllocates(FakeBlockPool):
    """A block that was taken over from the cache stays among the free ones."""

    def touch(self, blocks):
        still_free = [block for block in blocks if block in self._free]
        super().touch(blocks)
        self._free.update(dict.fromkeys(still_free))


class CountsNoReferences(FakeBlockPool):
    """The first to give a shared block back frees it for all."""

    def touch(self, blocks):
        for block in blocks:
            self._free.pop(block, None)
            self._references[block] = 1

    def free_blocks(self, blocks):
        super().free_blocks(block for block in blocks if self._references[block])


class ForgetsTheCacheOnFree(FakeBlockPool):
    def free_blocks(self, blocks):
        blocks = list(blocks)
        for block in blocks:
            self._forget(block)
        super().free_blocks(blocks)


class FirstBlockFirst(FakeKVCacheGroup):
    """The first block of a request is evicted before its last."""

    def free(self, request_id):
        self.tables.get(request_id, []).reverse()
        super().free(request_id)


class KeepsWhatLeavesTheWindow(FakeKVCacheGroup):
    def leave_window(self, request_id, computed_tokens):
        pass


class WindowTooShort(FakeKVCacheGroup):
    def leave_window(self, request_id, computed_tokens):
        super().leave_window(request_id, computed_tokens + 1)


MUTANTS = {
    LeaksOnFree: "K2",
    OffByOneBlock: "K1",
    ForgetsLookahead: "K1",
    RefusesTheLastBlock: "K3",
    ChangesOnRefusal: "K3",
    IgnoresTheWholeSequence: "K4",
    AsksForMoreThanTheWindow: "K4",
    HandsOutTheNullBlock: "K5",
    DoubleAllocates: "K2",
    CountsNoReferences: "K2",
    SharesOnlyTheTokensOfABlock: "K6",
    LeavesNoTokenToCompute: "K6",
    SharesDrafts: "K6",
    ForgetsTheCacheOnFree: "K6",
    LastReuseFirst: "K7",
    FirstBlockFirst: "K7",
    KeepsWhatLeavesTheWindow: "K8",
    WindowTooShort: "K8",
}


def factory_of(mutant):
    """Makes the fake KV cache manager with one part replaced by a mutant."""

    def make(options):
        if issubclass(mutant, FakeKVCacheManager):
            return make_fake_manager(options, mutant)
        manager = make_fake_manager(options)
        if issubclass(mutant, FakeBlockPool):
            manager.block_pool = mutant(options.num_gpu_blocks)
            for group in manager._groups:
                group._pool = manager.block_pool
        else:
            for group in manager._groups:
                group.__class__ = mutant
        return manager

    return make


def rules_broken(mutant):
    """The rules by which the examples of the contract reject a manager, and one text that shows it."""
    texts = []
    for name, test in inspect.getmembers(KVManagerContract, inspect.isfunction):
        if re.match(r"test_k\d", name):
            try:
                test(KVManagerContract(), ledger_factory(factory_of(mutant)))
            except (AssertionError, ValueError) as error:
                texts.append(str(error))
    return {text.split(":")[0] for text in texts}, texts


@pytest.mark.parametrize(
    ("mutant", "rule"), MUTANTS.items(), ids=lambda value: getattr(value, "__name__", value)
)
def test_the_examples_reject_a_mutant_by_its_rule(mutant, rule):
    rules, texts = rules_broken(mutant)
    assert rule in rules, f"rejected by {rules or 'nothing'}"
    shown = next(text for text in texts if text.startswith(rule))
    assert "expected" in shown
    assert "history:" in shown


def test_the_examples_accept_the_fake_itself():
    assert rules_broken(FakeKVCacheManager) == (set(), [])


RARELY_MET = {AsksForMoreThanTheWindow}
"""Random histories seldom meet the bound of a window's admission; an example states it."""


@pytest.mark.parametrize(
    "mutant", [mutant for mutant in MUTANTS if mutant not in RARELY_MET], ids=lambda mutant: mutant.__name__
)
def test_random_histories_reject_a_mutant(mutant):
    machine = kv_histories(factory_of(mutant), (BLOCK + 2,), enable_caching=True)
    settings = hypothesis_settings(
        max_examples=2000, stateful_step_count=40, deadline=None, derandomize=True, phases=[Phase.generate]
    )
    with pytest.raises((AssertionError, ValueError)):
        run_state_machine_as_test(machine, settings=settings)

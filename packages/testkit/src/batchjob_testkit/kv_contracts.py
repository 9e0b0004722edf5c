"""The contract of a KV cache manager, as one class to subclass.

.. code-block:: python

    class TestMyManager(KVManagerContract):
        @pytest.fixture
        def make_manager(self):
            return lambda options: MyManager(options.num_gpu_blocks, options.block_size)

Each test is named by the rule that it checks; after every event of each of them all rules are compared
with a ledger, and the last test does so over random histories.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from batchjob_testkit.contracts import Contract
from batchjob_testkit.factories import checked, checked_of
from batchjob_testkit.fakes import FakeRequest
from batchjob_testkit.kv_ledger import (
    TOKENS_IN_FLIGHT,
    KVCacheManager,
    KVCacheOptions,
    KVLedger,
    KVManagerFactory,
)

BLOCK = 4

FACTORY_OF_A_MANAGER = "KVCacheOptions that makes an empty KV cache manager"


def prompt(name: str, *parts: tuple[int, int]) -> FakeRequest:
    """A request whose prompt is made of parts: a token, and how often it is repeated.

    >>> prompt("1", (7, 2), (8, 3)).prompt_token_ids
    [7, 7, 8, 8, 8]
    """
    tokens = [token for token, times in parts for _ in range(times)]
    return FakeRequest(name, len(tokens), max_tokens=64, prompt_token_ids=tokens)


def ledger_factory(make_manager: KVManagerFactory) -> Callable[..., KVLedger]:
    """Makes ledgers around managers with so many blocks to hand out, and the options named."""

    def make(usable_blocks: int, **options: Any) -> KVLedger:
        kv_options = KVCacheOptions(num_gpu_blocks=usable_blocks + 1, block_size=BLOCK, **options)
        return KVLedger(make_manager, kv_options)

    return make


class KVManagerContract(Contract):
    """Rules K of a KV cache manager. Override :meth:`make_manager`.

    For a feature that a manager does not have the factory may call ``pytest.skip``.
    """

    @pytest.fixture
    def make_manager(self) -> KVManagerFactory:
        """The factory of the manager under test."""
        raise self._not_overridden("make_manager", FACTORY_OF_A_MANAGER)

    @pytest.fixture
    def new_manager(self, make_manager: Any) -> KVManagerFactory:
        """The factory, and one line for whatever is wrong with it."""
        return checked(make_manager, self._named("make_manager"), KVCacheManager)

    @pytest.fixture
    def make_ledger(self, new_manager: KVManagerFactory) -> Callable[..., KVLedger]:
        """Makes a ledger around the manager under test."""
        return ledger_factory(new_manager)

    # --- K1 to K5: blocks ---------------------------------------------------------------------------

    def test_k1_a_request_holds_the_blocks_that_its_tokens_fill(self, make_ledger: Any) -> None:
        for tokens, blocks in ((1, 1), (BLOCK, 1), (BLOCK + 1, 2)):
            kv = make_ledger(8)
            request = prompt("a", (1, tokens))
            assert kv.start(request)
            assert [len(table) for table in kv.blocks_of(request)] == [blocks]

    def test_k1_a_block_is_added_when_the_last_one_is_full(self, make_ledger: Any) -> None:
        kv = make_ledger(8)
        request = prompt("a", (1, BLOCK - 1))
        kv.start(request)
        held = []
        for _ in range(BLOCK + 2):
            kv.step(request)
            held.append(len(kv.blocks_of(request)[0]))
        assert held == [1] + [2] * BLOCK + [3]

    def test_k1_there_is_room_for_lookahead_tokens(self, make_ledger: Any) -> None:
        kv = make_ledger(8)
        request = prompt("a", (1, BLOCK))
        kv.start(request, lookahead=1)
        assert len(kv.blocks_of(request)[0]) == 2
        kv.step(request, lookahead=BLOCK)
        assert len(kv.blocks_of(request)[0]) == 3

    def test_k1_lookahead_tokens_end_at_the_models_limit(self, make_ledger: Any) -> None:
        kv = make_ledger(8, max_model_len=2 * BLOCK)
        request = prompt("a", (1, 2 * BLOCK - 1))
        assert kv.start(request, lookahead=2 * BLOCK)
        assert len(kv.blocks_of(request)[0]) == 2

    def test_k2_what_is_freed_can_be_allocated_again(self, make_ledger: Any) -> None:
        kv = make_ledger(4)
        for name in ("a", "b", "c"):
            request = prompt(name, (1, 4 * BLOCK - 1))
            assert kv.start(request)
            assert kv.step(request)
            assert kv.free_blocks() == 0
            kv.end(request)
            assert kv.free_blocks() == 4

    def test_k2_a_preempted_request_holds_nothing_and_comes_back(self, make_ledger: Any) -> None:
        kv = make_ledger(4)
        request = prompt("a", (1, 2 * BLOCK))
        kv.start(request)
        kv.step(request)
        kv.preempt(request)
        assert kv.free_blocks() == 4
        assert not any(kv.blocks_of(request))
        assert kv.start(request)
        assert request.num_computed_tokens == 2 * BLOCK + 2

    def test_k3_the_last_block_is_given_and_no_more(self, make_ledger: Any) -> None:
        kv = make_ledger(3)
        assert kv.start(prompt("a", (1, 2 * BLOCK)))
        assert not kv.start(prompt("b", (2, BLOCK + 1)))
        assert kv.free_blocks() == 1
        assert kv.start(prompt("c", (3, BLOCK)))
        assert kv.free_blocks() == 0

    def test_k3_a_refused_step_leaves_the_request_as_it_was(self, make_ledger: Any) -> None:
        kv = make_ledger(3)
        request = prompt("a", (1, BLOCK))
        kv.start(request)
        kv.start(prompt("b", (2, BLOCK)))
        before = kv.blocks_of(request)
        assert not kv.step(request, lookahead=BLOCK)
        assert kv.blocks_of(request) == before
        assert kv.free_blocks() == 1
        assert kv.step(request)

    def test_k4_the_whole_sequence_must_fit_if_asked(self, make_ledger: Any) -> None:
        for tokens, admitted in ((3 * BLOCK, True), (3 * BLOCK + 1, False)):
            kv = make_ledger(4)
            kv.start(prompt("a", (1, BLOCK)))
            request = prompt("b", (2, tokens))
            assert kv.start(request, BLOCK, whole=True) is admitted
            assert kv.free_blocks() == (2 if admitted else 3)

    def test_k4_a_window_needs_no_more_than_it_holds_while_a_step_is_computed(self, make_ledger: Any) -> None:
        """The 4 tokens before the next and a step's 4 lie in 3 blocks at most, of a sequence of 5."""
        for usable_blocks, admitted in ((3, True), (2, False)):
            kv = make_ledger(usable_blocks, sliding_windows=(BLOCK + 1,), max_in_flight_tokens=BLOCK)
            assert kv.start(prompt("a", (1, 5 * BLOCK)), BLOCK, whole=True) is admitted

    def test_k5_no_block_has_two_owners(self, make_ledger: Any) -> None:
        kv = make_ledger(6)
        requests = [prompt(name, (1, 2 * BLOCK)) for name in ("a", "b", "c")]
        for request in requests:
            assert kv.start(request)
        assert sorted(block for r in requests for block in kv.blocks_of(r)[0]) == [1, 2, 3, 4, 5, 6]

    # --- K6 and K7: prefix caching --------------------------------------------------------------------

    def test_k6_a_running_requests_prefix_is_shared(self, make_ledger: Any) -> None:
        kv = make_ledger(8, enable_caching=True)
        first, second = prompt("a", (1, 2 * BLOCK), (2, BLOCK)), prompt("b", (1, 2 * BLOCK), (3, BLOCK))
        kv.start(first)
        kv.start(second)
        assert kv.blocks_of(second)[0][:2] == kv.blocks_of(first)[0][:2]
        assert kv.free_blocks() == 8 - 4

    def test_k6_a_shared_block_is_free_when_its_last_holder_gives_it_up(self, make_ledger: Any) -> None:
        kv = make_ledger(8, enable_caching=True)
        requests = [prompt(name, (1, 2 * BLOCK), (own, 1)) for own, name in enumerate("abc", start=2)]
        free = []
        for request in requests:
            kv.start(request)
        for request in requests:
            kv.end(request)
            free.append(kv.free_blocks())
        assert free == [8 - 4, 8 - 3, 8]

    def test_k6_one_token_is_left_to_compute(self, make_ledger: Any) -> None:
        for tokens, cached in ((2 * BLOCK, BLOCK), (2 * BLOCK + 1, 2 * BLOCK)):
            kv = make_ledger(8, enable_caching=True)
            kv.start(prompt("a", (1, 3 * BLOCK)))
            assert kv.find(prompt("b", (1, tokens))) == cached

    def test_k6_a_block_counts_only_with_all_that_comes_before_it(self, make_ledger: Any) -> None:
        kv = make_ledger(8, enable_caching=True)
        kv.start(prompt("a", (1, BLOCK), (2, BLOCK)))
        assert kv.start(prompt("b", (3, BLOCK), (2, BLOCK), (4, 1)))
        assert kv.free_blocks() == 8 - 2 - 3

    def test_k6_a_partly_filled_block_is_not_shared(self, make_ledger: Any) -> None:
        kv = make_ledger(8, enable_caching=True)
        kv.start(prompt("a", (1, 2 * BLOCK)), BLOCK + 1)
        kv.start(prompt("b", (1, 2 * BLOCK + 1)), 1)
        assert kv.free_blocks() == 8 - 3

    def test_k6_unverified_drafts_are_not_shared(self, make_ledger: Any) -> None:
        kv = make_ledger(8, enable_caching=True)
        first = prompt("a", (1, BLOCK - 1))
        kv.start(first, drafts=BLOCK)
        assert kv.find(prompt("b", *((t, 1) for t in first.all_token_ids), (2, 1))) == 0

    def test_k6_a_prefix_is_found_again_after_its_request_ended(self, make_ledger: Any) -> None:
        kv = make_ledger(8, enable_caching=True)
        first = prompt("a", (1, 2 * BLOCK + 1))
        kv.start(first)
        blocks = kv.blocks_of(first)[0][:2]
        kv.end(first)
        second = prompt("b", (1, 2 * BLOCK + 1))
        kv.start(second)
        assert kv.blocks_of(second)[0][:2] == blocks

    def test_k6_a_preempted_request_finds_its_own_blocks(self, make_ledger: Any) -> None:
        kv = make_ledger(8, enable_caching=True)
        request = prompt("a", (1, 2 * BLOCK))
        for _ in range(3):
            kv.step(request) if request.num_computed_tokens else kv.start(request)
        kv.preempt(request)
        assert kv.find(request) == 2 * BLOCK

    def test_k6_a_free_block_that_is_found_again_is_no_longer_free(self, make_ledger: Any) -> None:
        """Three blocks are free, but two are those that it begins with."""
        kv = make_ledger(3, enable_caching=True)
        first = prompt("a", (1, 2 * BLOCK))
        kv.start(first)
        kv.end(first)
        assert not kv.start(prompt("b", (1, 2 * BLOCK), (2, BLOCK + 1)))
        assert kv.start(prompt("c", (1, 2 * BLOCK), (2, BLOCK)))

    def test_k6_without_caching_nothing_is_found(self, make_ledger: Any) -> None:
        kv = make_ledger(8)
        kv.start(prompt("a", (1, 2 * BLOCK)))
        kv.start(prompt("b", (1, 2 * BLOCK)))
        assert kv.free_blocks() == 8 - 4

    def test_k7_what_caches_nothing_is_taken_first(self, make_ledger: Any) -> None:
        kv = make_ledger(4, enable_caching=True)
        cached = prompt("a", (1, 2 * BLOCK))
        kv.start(cached)
        kv.end(cached)
        kv.start(prompt("b", (2, 2 * BLOCK)))
        assert kv.find(prompt("c", (1, 3 * BLOCK))) == 2 * BLOCK

    def test_k7_the_last_block_of_a_request_is_evicted_before_its_first(self, make_ledger: Any) -> None:
        kv = make_ledger(3, enable_caching=True)
        cached = prompt("a", (1, 3 * BLOCK))
        kv.start(cached)
        kv.end(cached)
        left = []
        for name in ("b", "c"):
            kv.start(prompt(name, (2, BLOCK - 1)))
            left.append(kv.find(prompt("d", (1, 4 * BLOCK))))
        assert left == [2 * BLOCK, BLOCK]

    def test_k7_what_was_given_back_longest_ago_is_evicted_first(self, make_ledger: Any) -> None:
        kv = make_ledger(3, enable_caching=True)
        requests = [prompt(name, (token, BLOCK)) for token, name in enumerate("abc")]
        for request in requests:
            kv.start(request)
        for request in (requests[1], requests[0], requests[2]):
            kv.end(request)
        again = prompt("again", (1, BLOCK), (9, 1))
        kv.start(again)  # takes b's block from the free ones, and evicts a's
        cached = [kv.find(prompt(f"d{t}", (t, BLOCK + 1))) for t in range(3)]
        assert cached == [0, BLOCK, BLOCK]

    # --- K8: sliding windows --------------------------------------------------------------------------

    def test_k8_blocks_out_of_the_window_are_given_back(self, make_ledger: Any) -> None:
        kv = make_ledger(8, sliding_windows=(BLOCK + 1,))
        request = prompt("a", (1, 3 * BLOCK))
        kv.start(request, 2 * BLOCK)
        kv.step(request)  # the next token attends to the 4 before it: one block
        assert kv.blocks_of(request)[0][0] == 0
        assert kv.free_blocks() == 8 - 2

    def test_k8_the_window_keeps_what_the_next_token_attends_to(self, make_ledger: Any) -> None:
        for window, kept in ((BLOCK + 1, 1), (BLOCK + 2, 2)):
            kv = make_ledger(8, sliding_windows=(window,))
            request = prompt("a", (1, 2 * BLOCK))
            kv.start(request)
            kv.step(request)
            assert sum(block != 0 for block in kv.blocks_of(request)[0][:2]) == kept

    def test_k8_what_a_step_in_flight_attends_to_is_kept(self, make_ledger: Any) -> None:
        kv = make_ledger(8, sliding_windows=(BLOCK + 1,))
        if TOKENS_IN_FLIGHT in kv.unclaimed:
            pytest.skip(f"{TOKENS_IN_FLIGHT} is not claimed")
        request = prompt("a", (1, 2 * BLOCK))
        kv.start(request)
        request.num_in_flight_tokens = 1
        kv.step(request)
        assert kv.blocks_of(request)[0][0] != 0

    def test_k8_each_group_has_its_own_blocks(self, make_ledger: Any) -> None:
        kv = make_ledger(8, sliding_windows=(None, BLOCK + 1))
        request = prompt("a", (1, 2 * BLOCK))
        kv.start(request)
        assert kv.free_blocks() == 8 - 4
        kv.step(request)
        assert kv.free_blocks() == 8 - 3 - 2
        kv.end(request)
        assert kv.free_blocks() == 8

    def test_k8_a_hit_needs_only_the_blocks_inside_the_window(self, make_ledger: Any) -> None:
        kv = make_ledger(4, sliding_windows=(BLOCK + 1,), enable_caching=True)
        first = prompt("a", (1, 3 * BLOCK))
        kv.start(first)
        kv.end(first)
        kv.start(prompt("b", (2, 2 * BLOCK)))  # takes the blank block, and evicts the last of a's
        second = prompt("c", (1, 4 * BLOCK))
        blocks, cached = kv.manager.get_computed_blocks(second)
        assert cached == 2 * BLOCK
        assert blocks[0][0] == 0
        assert kv.start(second, BLOCK)

    # --- everything at once -------------------------------------------------------------------------

    @pytest.mark.parametrize("enable_caching", [False, True], ids=["no caching", "prefix caching"])
    @pytest.mark.parametrize(
        "sliding_windows",
        [(None,), (BLOCK + 2,), (None, BLOCK + 2)],
        ids=["full attention", "sliding window", "full and sliding"],
    )
    def test_random_histories(
        self,
        new_manager: KVManagerFactory,
        seeded: Any,
        sliding_windows: tuple[int | None, ...],
        enable_caching: bool,
    ) -> None:
        """K1 to K8 hold after every event of random histories."""
        new_manager(KVCacheOptions(num_gpu_blocks=2, sliding_windows=sliding_windows))  # may skip
        run_state_machine_as_test(
            seeded(kv_histories(new_manager, sliding_windows, enable_caching)),
            settings=hypothesis_settings(stateful_step_count=40, deadline=None),
        )


class KVHistories(RuleBasedStateMachine):
    """Requests come, share prefixes, compute in chunks, decode, are preempted and end, in a small pool."""

    make_manager: KVManagerFactory
    sliding_windows: tuple[int | None, ...] = (None,)
    enable_caching: bool = False

    def __init__(self) -> None:
        super().__init__()
        self._new_manager = checked_of(type(self), "make_manager", KVCacheManager, FACTORY_OF_A_MANAGER)
        self.waiting: list[FakeRequest] = []
        self.arrivals = 0

    @initialize(
        usable_blocks=st.integers(2, 16),
        block_size=st.sampled_from([BLOCK, 1, 3]),
        max_model_len=st.sampled_from([4096, 14]),
        max_in_flight_tokens=st.sampled_from([4096, 3]),
    )
    def begin(
        self, usable_blocks: int, block_size: int, max_model_len: int, max_in_flight_tokens: int
    ) -> None:
        """An empty KV cache."""
        self.kv = KVLedger(
            self._new_manager,
            KVCacheOptions(
                num_gpu_blocks=usable_blocks + 1,
                block_size=block_size,
                enable_caching=self.enable_caching,
                sliding_windows=self.sliding_windows,
                max_model_len=max_model_len,
                max_in_flight_tokens=max_in_flight_tokens,
            ),
        )

    @rule(shared=st.sampled_from([0, 4, 9, 12]), other=st.integers(0, 4), own=st.integers(0, 9))
    def arrive(self, shared: int, other: int, own: int) -> None:
        """A request whose prompt may begin as that of others."""
        request = prompt(f"r{self.arrivals}", (1, shared), (2, other), (10 + self.arrivals, own))
        if 0 < request.num_tokens < self.kv.options.max_model_len:
            self.arrivals += 1
            self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule(
        data=st.data(), tokens=st.integers(1, 20), lookahead=st.sampled_from([0, 0, 3]), whole=st.booleans()
    )
    def start(self, data: st.DataObject, tokens: int, lookahead: int, whole: bool) -> None:
        """A waiting request runs if it finds room."""
        request = data.draw(st.sampled_from(self.waiting))
        if self.kv.start(request, tokens, lookahead=lookahead, whole=whole):
            self.waiting.remove(request)
            self._end_at_the_limit(request)

    @precondition(lambda self: self.kv.requests)
    @rule(
        data=st.data(),
        tokens=st.integers(1, 8),
        drafts=st.sampled_from([0, 0, 1, 4]),
        accepted=st.integers(0, 4),
        lookahead=st.sampled_from([0, 0, 3]),
        in_flight=st.sampled_from([0, 0, 2]),
    )
    def step(
        self,
        data: st.DataObject,
        tokens: int,
        drafts: int,
        accepted: int,
        lookahead: int,
        in_flight: int,
    ) -> None:
        """A running request computes a chunk of its prompt, or decodes."""
        request = self._draw_running(data)
        drafts = min(drafts, self.kv.options.max_model_len - request.num_tokens)
        request.num_in_flight_tokens = 0 if TOKENS_IN_FLIGHT in self.kv.unclaimed else in_flight
        self.kv.step(request, tokens, drafts=drafts, accepted=accepted, lookahead=lookahead)
        self._end_at_the_limit(request)

    @precondition(lambda self: self.kv.requests)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """A running request is thrown out and waits."""
        request = self._draw_running(data)
        self.kv.preempt(request)
        self.waiting.append(request)

    @precondition(lambda self: self.kv.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A running request ends."""
        self.kv.end(self._draw_running(data))

    def _end_at_the_limit(self, request: FakeRequest) -> None:
        if request.num_tokens >= self.kv.options.max_model_len:
            self.kv.end(request)

    def _draw_running(self, data: st.DataObject) -> FakeRequest:
        return data.draw(st.sampled_from(list(self.kv.requests.values())))


def kv_histories(
    make_manager: KVManagerFactory, sliding_windows: tuple[int | None, ...], enable_caching: bool
) -> type[KVHistories]:
    """The machine for one factory; give it to ``run_state_machine_as_test``."""
    members = {
        "make_manager": staticmethod(make_manager),
        "sliding_windows": sliding_windows,
        "enable_caching": enable_caching,
    }
    return type("KVHistoriesOfFactory", (KVHistories,), members)

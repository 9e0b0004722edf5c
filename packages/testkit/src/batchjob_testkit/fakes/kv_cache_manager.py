"""Blocks per request, allocated, cached and evicted as vLLM's KV cache manager does."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

from batchjob_testkit.fakes.block_pool import NULL_BLOCK, FakeBlockPool
from batchjob_testkit.fakes.kv_cache_group import FakeKVCacheGroup
from batchjob_testkit.fakes.request import FakeRequest

BlockIds = tuple[list[int], ...]
"""The numbers of blocks in the order of the tokens, a list for each KV cache group."""


class FakeKVCacheManager:
    """Hands the blocks of ``block_pool`` to requests.

    There is a KV cache group for each of ``sliding_windows``: full attention for None, else attention to
    so many last tokens, two at least. ``max_in_flight_tokens`` is what a step may compute at most; it
    bounds what a window can hold, and so what ``full_sequence_must_fit`` asks for.

    >>> manager = FakeKVCacheManager(FakeBlockPool(5), block_size=16)
    >>> request = FakeRequest("1", num_prompt_tokens=20, max_tokens=8)
    >>> manager.allocate_slots(request, 20)
    ([1, 2],)
    >>> manager.allocate_slots(FakeRequest("2", num_prompt_tokens=50, max_tokens=8), 50) is None
    True
    >>> manager.free(request)
    >>> manager.block_pool.get_num_free_blocks()
    4
    """

    def __init__(
        self,
        block_pool: FakeBlockPool,
        block_size: int,
        *,
        enable_caching: bool = False,
        sliding_windows: Sequence[int | None] = (None,),
        max_model_len: int = sys.maxsize,
        max_in_flight_tokens: int = sys.maxsize,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; at least 1 token is needed")
        self.block_pool = block_pool
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.max_model_len = max_model_len
        self._groups = [
            FakeKVCacheGroup(
                block_pool,
                group_id,
                block_size,
                window,
                _blocks_per_request(window, max_in_flight_tokens, max_model_len, block_size),
            )
            for group_id, window in enumerate(sliding_windows)
        ]

    def get_computed_blocks(self, request: FakeRequest) -> tuple[BlockIds, int]:
        """The cached blocks that a request can begin with, and how many tokens they hold.

        At least one token is left to compute, since its result is what the next token is sampled from.
        """
        if not self.enable_caching:
            return self._no_blocks(), 0
        hashes = self._block_hashes(request)
        length = (request.num_tokens - 1) // self.block_size
        while (shorter := min(group.longest_hit(hashes[:length]) for group in self._groups)) < length:
            length = shorter
        blocks = tuple(group.hit_blocks(hashes[:length]) for group in self._groups)
        return blocks, length * self.block_size

    def allocate_slots(
        self,
        request: FakeRequest,
        num_new_tokens: int,
        *,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: BlockIds | None = None,
        num_lookahead_tokens: int = 0,
        full_sequence_must_fit: bool = False,
    ) -> BlockIds | None:
        """The new blocks for ``num_new_tokens`` more tokens, or None if there are too few.

        A request that begins takes over ``new_computed_blocks`` with ``num_new_computed_tokens`` tokens, as
        :meth:`get_computed_blocks` found them. Room is made for ``num_lookahead_tokens`` more, which are
        not cached. With ``full_sequence_must_fit`` all tokens of the request must find room.

        Raises:
            ValueError: if there is nothing to allocate for, or a request that runs is given cached blocks.
        """
        hits = new_computed_blocks or self._no_blocks()
        self._check_arguments(request, num_new_tokens, num_new_computed_tokens, hits)
        computed = request.num_computed_tokens + num_new_computed_tokens
        if full_sequence_must_fit and not self._whole_sequence_fits(request, hits, computed):
            return None
        for group in self._groups:
            group.leave_window(request.request_id, max(0, computed - request.num_in_flight_tokens))
        slots = min(computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        needed = sum(
            group.blocks_needed(request.request_id, slots, group_hits, computed)
            for group, group_hits in zip(self._groups, hits, strict=True)
        )
        if needed > self.block_pool.get_num_free_blocks():
            return None
        if any(hits):  # in all groups before any takes a new block, which could evict another's hit
            for group, group_hits in zip(self._groups, hits, strict=True):
                group.adopt(request.request_id, group_hits, computed)
        new_blocks = tuple(group.extend(request.request_id, slots) for group in self._groups)
        if self.enable_caching:
            self._cache(request, min(computed + num_new_tokens, request.num_tokens))
        return new_blocks

    def free(self, request: FakeRequest) -> None:
        """Give the blocks of a request back; what they cache can be found until they are handed out again."""
        for group in self._groups:
            group.free(request.request_id)

    def get_block_ids(self, request_id: str) -> BlockIds:
        """The blocks of a request in each group, 0 where a sliding window has moved on."""
        return tuple(list(group.table(request_id)) for group in self._groups)

    def check_integrity(self, held_by_others: Iterable[int] = ()) -> None:
        """The pool is whole, and each block is held as often as it stands in the tables of requests.

        Raises:
            AssertionError: with the ledger.
        """
        self.block_pool.check_integrity()
        uses = Counter(held_by_others)
        for group in self._groups:
            for table in group.tables.values():
                uses.update(block for block in table if block != NULL_BLOCK)
        counted = [uses[block] for block in range(self.block_pool.num_gpu_blocks)]
        references = self.block_pool.references()
        tables = [group.tables for group in self._groups]
        assert counted == references, (
            f"uses in tables {counted} != references {references}\n"
            f"  tables of each group: {tables}\n{self.block_pool.ledger()}"
        )

    def _no_blocks(self) -> BlockIds:
        return tuple([] for _ in self._groups)

    def _check_arguments(
        self, request: FakeRequest, num_new_tokens: int, num_new_computed_tokens: int, hits: BlockIds
    ) -> None:
        if num_new_tokens + num_new_computed_tokens < 1:
            raise ValueError(
                f"num_new_tokens is {num_new_tokens}; without cached tokens at least 1 is needed"
            )
        if any(hits) and any(group.table(request.request_id) for group in self._groups):
            raise ValueError(f"request {request.request_id!r} holds blocks and is given cached blocks {hits}")

    def _whole_sequence_fits(self, request: FakeRequest, hits: BlockIds, computed: int) -> bool:
        tokens = min(request.num_tokens, self.max_model_len)
        needed = sum(
            group.blocks_needed_at_most(request.request_id, tokens, group_hits, computed)
            for group, group_hits in zip(self._groups, hits, strict=True)
        )
        return needed <= self.block_pool.get_num_free_blocks()

    def _cache(self, request: FakeRequest, tokens: int) -> None:
        hashes = self._block_hashes(request)
        for group in self._groups:
            group.cache(request.request_id, hashes, tokens // self.block_size)

    def _block_hashes(self, request: FakeRequest) -> list[bytes]:
        """A hash per full block of the request, of its tokens and all before; kept on the request."""
        hashes = request.block_hashes
        known = len(hashes) * self.block_size
        if request.num_tokens - known >= self.block_size:
            tokens = request.all_token_ids
            for start in range(known, len(tokens) - self.block_size + 1, self.block_size):
                parent = hashes[-1] if hashes else b""
                block = ",".join(map(str, tokens[start : start + self.block_size]))
                hashes.append(hashlib.sha256(parent + block.encode()).digest())
        return hashes


def _blocks_per_request(
    window: int | None, in_flight_tokens: int, max_model_len: int, block_size: int
) -> int:
    """The most blocks that a request holds in a group; a window may begin and end within a block."""
    if window is None:
        return sys.maxsize
    if window <= 1:
        raise ValueError(
            f"a sliding window is {window}; at least 2 tokens are needed, or None for full attention"
        )
    return -(-min(window - 1 + in_flight_tokens, max_model_len) // block_size) + 1

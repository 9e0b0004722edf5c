"""The block tables of one KV cache group: layers that share an attention type and so their tables."""

from __future__ import annotations

from collections.abc import Sequence

from batchjob_testkit.fakes.block_pool import NULL_BLOCK, FakeBlockPool


class FakeKVCacheGroup:
    """Full attention over all tokens, or over the last ``sliding_window`` of them.

    The table of a request has a block per ``block_size`` tokens, in the order of the tokens, and the null
    block where the window has moved on.
    """

    def __init__(
        self,
        block_pool: FakeBlockPool,
        group_id: int,
        block_size: int,
        sliding_window: int | None,
        max_blocks_per_request: int,
    ) -> None:
        self.tables: dict[str, list[int]] = {}
        self._pool = block_pool
        self._group_id = group_id
        self._block_size = block_size
        self._sliding_window = sliding_window
        self._max_blocks_per_request = max_blocks_per_request
        self._num_cached: dict[str, int] = {}

    def table(self, request_id: str) -> list[int]:
        """The blocks of a request, those out of the window as null blocks."""
        return self.tables.get(request_id, [])

    # --- taking and giving blocks -----------------------------------------------------------------

    def blocks_needed(self, request_id: str, tokens: int, hits: Sequence[int], computed_tokens: int) -> int:
        """The free blocks that a request takes to hold ``tokens`` tokens, of which so many are computed.

        The free ones among ``hits``, the cached blocks that it begins with, are taken, too.
        """
        held = len(self.table(request_id))
        skipped = self._blocks_out_of_window(computed_tokens)
        new = max(0, self._blocks_for(tokens) - max(skipped, held + len(hits)))
        return new + self._pool.num_free_among(hits[max(0, skipped - held) :])

    def blocks_needed_at_most(
        self, request_id: str, tokens: int, hits: Sequence[int], computed_tokens: int
    ) -> int:
        """As :meth:`blocks_needed`, where the window never holds more than ``max_blocks_per_request``."""
        tokens = min(tokens, self._max_blocks_per_request * self._block_size)
        return self.blocks_needed(request_id, tokens, hits, computed_tokens)

    def leave_window(self, request_id: str, computed_tokens: int) -> None:
        """Give the blocks back that no later token attends to."""
        table = self.table(request_id)
        left: list[int] = []
        for position in reversed(range(min(self._blocks_out_of_window(computed_tokens), len(table)))):
            if table[position] == NULL_BLOCK:
                break
            left.append(table[position])
            table[position] = NULL_BLOCK
        self._pool.free_blocks(left)

    def adopt(self, request_id: str, hits: Sequence[int], computed_tokens: int) -> None:
        """Begin a request's table with cached blocks."""
        skipped = self._blocks_out_of_window(computed_tokens)
        self._pool.touch(hits[skipped:])
        self.tables[request_id] = [NULL_BLOCK] * skipped + list(hits[skipped:])
        self._num_cached[request_id] = len(hits)

    def extend(self, request_id: str, tokens: int) -> list[int]:
        """Take new blocks until the request's table holds ``tokens`` tokens, and return them."""
        table = self.tables.setdefault(request_id, [])
        new_blocks = self._pool.get_new_blocks(max(0, self._blocks_for(tokens) - len(table)))
        table += new_blocks
        return new_blocks

    def free(self, request_id: str) -> None:
        """Give all blocks of a request back, the last one first, so that it is evicted first."""
        self._num_cached.pop(request_id, None)
        self._pool.free_blocks(reversed(self.tables.pop(request_id, [])))

    # --- prefix caching ---------------------------------------------------------------------------

    def cache(self, request_id: str, hashes: Sequence[bytes], num_full_blocks: int) -> None:
        """Let the first ``num_full_blocks`` blocks of a request be found by their hashes."""
        table = self.tables[request_id]
        for position in range(self._num_cached.get(request_id, 0), num_full_blocks):
            if table[position] != NULL_BLOCK:
                self._pool.cache_block(table[position], (self._group_id, hashes[position]))
            self._num_cached[request_id] = position + 1

    def longest_hit(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks need not be computed, since what a later token attends to is cached."""
        if self._sliding_window is None:
            misses = (n for n in range(len(hashes)) if self._cached_block(hashes[n]) is None)
            return next(misses, len(hashes))
        window = self._window_blocks()
        run = 0
        for position in reversed(range(len(hashes))):
            run = run + 1 if self._cached_block(hashes[position]) is not None else 0
            if run == window:
                return position + window
        return run

    def hit_blocks(self, hashes: Sequence[bytes]) -> list[int]:
        """The cached blocks of a hit of that length, null blocks where the window does not reach."""
        first = 0 if self._sliding_window is None else max(0, len(hashes) - self._window_blocks())
        blocks = (self._cached_block(block_hash) for block_hash in hashes[first:])
        return [NULL_BLOCK] * first + [block for block in blocks if block is not None]

    # --- helpers ----------------------------------------------------------------------------------

    def _cached_block(self, block_hash: bytes) -> int | None:
        return self._pool.get_cached_block((self._group_id, block_hash))

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _window_blocks(self) -> int:
        """The blocks before a block's end that its next token attends to."""
        assert self._sliding_window is not None
        return self._blocks_for(self._sliding_window - 1)

    def _blocks_out_of_window(self, computed_tokens: int) -> int:
        """The leading blocks that the token after ``computed_tokens`` does not attend to."""
        if self._sliding_window is None:
            return 0
        return max(0, computed_tokens - self._sliding_window + 1) // self._block_size

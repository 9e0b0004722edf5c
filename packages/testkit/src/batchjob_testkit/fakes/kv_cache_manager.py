"""Blocks per request, allocated as vLLM's KV cache manager does for full attention without caching."""

from __future__ import annotations

from batchjob_testkit.fakes.block_pool import FakeBlockPool
from batchjob_testkit.fakes.request import FakeRequest


class FakeKVCacheManager:
    """Hands the blocks of ``block_pool`` to requests.

    >>> manager = FakeKVCacheManager(FakeBlockPool(5), block_size=16)
    >>> manager.allocate_slots(FakeRequest("1", num_prompt_tokens=20, max_tokens=8), 20)
    [1, 2]
    """

    def __init__(self, block_pool: FakeBlockPool, block_size: int) -> None:
        self.block_pool = block_pool
        self.block_size = block_size
        self._blocks: dict[str, list[int]] = {}

    def allocate_slots(
        self,
        request: FakeRequest,
        num_new_tokens: int,
        num_lookahead_tokens: int = 0,
        full_sequence_must_fit: bool = False,
    ) -> list[int] | None:
        """The new blocks for ``num_new_tokens`` more tokens, or None if there are too few.

        With ``full_sequence_must_fit`` all tokens of the request must find room, not only the new ones.
        """
        tokens = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
        missing = self._missing_blocks(request, tokens)
        required = missing
        if full_sequence_must_fit:
            required = max(missing, self._missing_blocks(request, request.num_tokens))
        if required > self.block_pool.get_num_free_blocks():
            return None
        blocks = self.block_pool.get_new_blocks(missing)
        self._blocks.setdefault(request.request_id, []).extend(blocks)
        return blocks

    def free(self, request: FakeRequest) -> None:
        """Give the blocks of a request back."""
        self.block_pool.free_blocks(reversed(self._blocks.pop(request.request_id, [])))

    def blocks_of(self, request_id: str) -> list[int]:
        """The blocks that a request holds."""
        return list(self._blocks.get(request_id, []))

    def check_integrity(self) -> None:
        """The pool is whole, and no block belongs to two requests.

        Raises:
            AssertionError: with the ledger.
        """
        self.block_pool.check_integrity()
        owned = [block for blocks in self._blocks.values() for block in blocks]
        assert len(owned) == len(set(owned)), f"a block belongs to two requests: {self._blocks}"

    def _missing_blocks(self, request: FakeRequest, tokens: int) -> int:
        held = len(self._blocks.get(request.request_id, []))
        return max(0, -(-tokens // self.block_size) - held)

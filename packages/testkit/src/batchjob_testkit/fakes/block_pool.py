"""A pool of KV cache blocks, with a ledger that says who holds which."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class FakeBlockPool:
    """``num_gpu_blocks`` blocks, of which block 0 is the null block that nobody can hold.

    >>> pool = FakeBlockPool(4)
    >>> pool.get_num_free_blocks(), pool.get_new_blocks(2), pool.get_num_free_blocks()
    (3, [1, 2], 1)
    """

    def __init__(self, num_gpu_blocks: int) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self._free: deque[int] = deque(range(1, num_gpu_blocks))
        self._held: set[int] = set()

    def get_num_free_blocks(self) -> int:
        """How many blocks can be handed out now."""
        return len(self._free)

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        """Hand out blocks, the longest free first.

        Raises:
            ValueError: if there are not so many.
        """
        if num_blocks > len(self._free):
            raise ValueError(f"asked for {num_blocks} blocks, {len(self._free)} are free")
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        self._held.update(blocks)
        return blocks

    def free_blocks(self, blocks: Iterable[int]) -> None:
        """Take blocks back.

        Raises:
            ValueError: if one of them is not held.
        """
        for block in blocks:
            if block not in self._held:
                raise ValueError(f"block {block} is given back, held are {sorted(self._held)}")
            self._held.remove(block)
            self._free.append(block)

    def check_integrity(self) -> None:
        """Every block but the null block is either free or held, and none is both.

        Raises:
            AssertionError: with both sides of the ledger.
        """
        free, held = sorted(self._free), sorted(self._held)
        whole = list(range(1, self.num_gpu_blocks))
        assert sorted(free + held) == whole, f"free {free} + held {held} != all {whole}"

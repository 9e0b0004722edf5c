"""A pool of KV cache blocks, with a ledger that says who holds which and what is cached where."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

NULL_BLOCK = 0
"""The block that stands where a request needs none; nobody can hold it."""


class FakeBlockPool:
    """``num_gpu_blocks`` blocks, of which block 0 is the null block.

    A block is free while nobody refers to it. A free block may still be cached under a key: it is found
    by that key until it is handed out again. Of the free blocks those that are not cached are handed out
    first, then the cached ones, the longest free first.

    >>> pool = FakeBlockPool(4)
    >>> pool.get_num_free_blocks(), pool.get_new_blocks(2), pool.get_num_free_blocks()
    (3, [1, 2], 1)
    >>> pool.cache_block(1, key="prefix")
    >>> pool.free_blocks([1, 2])
    >>> pool.free_order(), pool.get_cached_block("prefix")
    ([2, 3, 1], 1)
    """

    def __init__(self, num_gpu_blocks: int) -> None:
        if num_gpu_blocks < 1:
            raise ValueError(f"num_gpu_blocks is {num_gpu_blocks}; at least 1 is needed, the null block")
        self.num_gpu_blocks = num_gpu_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_gpu_blocks))
        self._references = [0] * num_gpu_blocks
        self._keys: dict[int, Hashable] = {}
        self._cached: dict[Hashable, dict[int, None]] = {}

    def get_num_free_blocks(self) -> int:
        """How many blocks can be handed out now, cached ones included."""
        return len(self._free)

    def free_order(self) -> list[int]:
        """The free blocks, the next to be handed out first."""
        return list(self._free)

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free."""
        return sum(block in self._free for block in blocks)

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        """Hand out blocks; what was cached in them is forgotten.

        Raises:
            ValueError: if there are not so many.
        """
        if num_blocks > len(self._free):
            raise ValueError(f"asked for {num_blocks} blocks, {len(self._free)} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(num_blocks)]
        for block in blocks:
            self._forget(block)
            self._references[block] = 1
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """One more refers to each of these blocks; those that were free no longer are."""
        for block in blocks:
            if block != NULL_BLOCK:
                self._free.pop(block, None)
                self._references[block] += 1

    def free_blocks(self, blocks: Iterable[int]) -> None:
        """One less refers to each of these blocks; null blocks among them are passed over.

        Raises:
            ValueError: if nobody refers to one of them.
        """
        freed: list[int] = []
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if not self._references[block]:
                raise ValueError(f"block {block} is given back, but nobody holds it\n{self.ledger()}")
            self._references[block] -= 1
            if not self._references[block]:
                freed.append(block)
        for block in freed:
            self._free[block] = None
        for block in reversed(freed):
            if block not in self._keys:
                self._free.move_to_end(block, last=False)

    def cache_block(self, block: int, key: Hashable) -> None:
        """Let a block be found by ``key`` until it is handed out again."""
        self._keys[block] = key
        self._cached.setdefault(key, {})[block] = None

    def get_cached_block(self, key: Hashable) -> int | None:
        """The block cached under ``key``, of several the one cached first; None if there is none."""
        return next(iter(self._cached.get(key, ())), None)

    def references(self) -> list[int]:
        """How many refer to each block, by its number."""
        return list(self._references)

    def ledger(self) -> str:
        """Every block in words: free or held, and whether it is cached."""
        lines = [
            f"  {len(self._free)} of {self.num_gpu_blocks} blocks are free, in order {self.free_order()}"
        ]
        for block, references in enumerate(self._references):
            state = "free" if block in self._free else f"held {references} times"
            cached = f", cached as {self._keys[block]!r}" if block in self._keys else ""
            lines.append(f"  block {block}: {'null' if block == NULL_BLOCK else state}{cached}")
        return "\n".join(lines)

    def check_integrity(self) -> None:
        """Every block but the null block is either free or held, and is found by the key it is cached under.

        Raises:
            AssertionError: with the ledger.
        """
        held = [block for block, references in enumerate(self._references) if references > 0]
        whole = list(range(1, self.num_gpu_blocks))
        assert sorted([*self._free, *held]) == whole, (
            f"free {sorted(self._free)} + held {held} != all {whole}\n{self.ledger()}"
        )
        found = {block: key for key, blocks in self._cached.items() for block in blocks}
        assert found == self._keys, f"found {found} != cached {self._keys}\n{self.ledger()}"

    def _forget(self, block: int) -> None:
        if block in self._keys:
            key = self._keys.pop(block)
            del self._cached[key][block]
            if not self._cached[key]:
                del self._cached[key]

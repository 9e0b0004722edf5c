"""vLLM's KV cache as the queue counts it.

A model whose layers attend differently has several KV cache groups that share one pool of blocks. Each
group takes its own blocks for a request: a full one for every token, a sliding window no more than it
looks back, a state space model the same for every length. For the queue a block is whatever holds
``block_size`` more tokens of one request in all groups, so that its arithmetic is the same for each.
"""

from __future__ import annotations

import inspect
import sys
from bisect import bisect_right
from math import gcd
from typing import Any

from batchjob_scheduler.reservation import blocks_for


class KVPool:
    """The pool of blocks of one of vLLM's schedulers."""

    def __init__(self, scheduler: Any) -> None:
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        coordinator = self._manager.coordinator
        self._count = coordinator.get_num_blocks_to_allocate
        self._arguments = inspect.signature(self._count).parameters.keys()
        self._max_tokens: int = scheduler.max_model_len
        # vLLM's own block size is the least common multiple, that of a state all tokens of a sequence.
        self.block_size = gcd(*(group.block_size for group in coordinator.single_type_managers))
        self._slots_beyond = self._find_slots_beyond(scheduler)
        # vLLM keeps one null block for itself.
        self.usable_blocks: int = self._pool.num_gpu_blocks - 1
        self.max_request_tokens = self._find_max_request_tokens()
        lengths = range(0, self._max_tokens + self.block_size, self.block_size)
        self._taken = [self._blocks(tokens, tokens) for tokens in lengths]
        self._is_plain = self._taken == list(range(len(lengths)))

    def blocks_for(self, tokens: int) -> int:
        """The blocks of the pool that a request of so many tokens takes to be computed on."""
        # No slot is ever asked for beyond the longest sequence.
        return self._blocks(tokens, min(tokens + self._slots_beyond, self._max_tokens))

    def free_blocks(self, kept_free: int) -> int:
        """The blocks that can be allocated now, less ``kept_free`` of the pool."""
        free: int = max(0, self._pool.get_num_free_blocks() - kept_free)
        if self._is_plain:
            return free
        longest = self._taken[-1]
        if free >= longest:  # several of the longest requests
            return (len(self._taken) - 1) * free // longest
        return bisect_right(self._taken, free) - 1

    def _find_slots_beyond(self, scheduler: Any) -> int:
        """The most slots beyond its tokens that a request may be asked for to be started (P2)."""
        drafts: int = scheduler.num_spec_tokens
        lookahead: int = scheduler.num_lookahead_tokens
        if drafts and scheduler.connector is not None:
            # A load is started only beside so many free blocks as a whole step may open.
            return blocks_for(1 + drafts + lookahead, self.block_size) * self.block_size
        # A request that finds all but its last token in the prefix cache is padded with drafts.
        return lookahead + (drafts if self._manager.enable_caching else 0)

    def _find_max_request_tokens(self) -> int:
        if self.blocks_for(self._max_tokens) <= self.usable_blocks:
            return sys.maxsize
        return bisect_right(range(self._max_tokens), self.usable_blocks, key=self.blocks_for) - 1

    def _blocks(self, tokens: int, slots: int) -> int:
        """What vLLM asks of the empty pool; which arguments it takes differs by version."""
        possible = {
            "request_id": "",
            "num_tokens": slots,
            "new_computed_blocks": self._manager.empty_kv_cache_blocks.blocks,
            "num_encoder_tokens": 0,
            "total_computed_tokens": 0,
            "num_local_computed_tokens": 0,
            "num_tokens_main_model": tokens,
            "apply_admission_cap": True,
            "prefill_end": tokens,
        }
        blocks: int = self._count(**{name: possible[name] for name in self._arguments if name in possible})
        return blocks

"""vLLM's real KV cache manager behind the interface of the fake one. Needs vLLM."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from batchjob_testkit.fakes import BlockIds, FakeRequest
from batchjob_testkit.kv_ledger import EVICTION_ORDER, TOKENS_IN_FLIGHT, KVCacheOptions

# Older versions count the tokens of the step that is computed, and no others in flight.
_KNOWS_TOKENS_IN_FLIGHT = "max_in_flight_tokens" in signature(KVCacheManager).parameters
_MOST_TOKENS = "max_in_flight_tokens" if _KNOWS_TOKENS_IN_FLIGHT else "max_num_batched_tokens"
# And there whoever gives blocks back says where they go in the order of reuse.
_SPARES_CACHED_BLOCKS = "prepend" not in signature(BlockPool.free_blocks).parameters


class VllmKVCacheManager:
    """Takes fake requests, keeps a real one for each that holds blocks, and answers in block numbers."""

    unclaimed = frozenset(
        name
        for name, claimed in (
            (EVICTION_ORDER, _SPARES_CACHED_BLOCKS),
            (TOKENS_IN_FLIGHT, _KNOWS_TOKENS_IN_FLIGHT),
        )
        if not claimed
    )
    """The rules that this version of vLLM does not keep."""

    def __init__(self, options: KVCacheOptions) -> None:
        register_all_kvcache_specs(None)  # what it is given matters only to platforms with specs of their own
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(options.block_size, sha256)
        self.manager: Any = KVCacheManager(
            kv_cache_config=KVCacheConfig(options.num_gpu_blocks, [], _groups(options)),
            max_model_len=options.max_model_len,
            scheduler_block_size=options.block_size,
            hash_block_size=options.block_size,
            enable_caching=options.enable_caching,
            **{_MOST_TOKENS: options.max_in_flight_tokens},
        )
        self.block_pool: Any = self.manager.block_pool
        self._requests: dict[str, Any] = {}

    def get_computed_blocks(self, request: FakeRequest) -> tuple[BlockIds, int]:
        """The cached blocks that a request can begin with, and how many tokens they hold."""
        blocks, num_tokens, *_ = self.manager.get_computed_blocks(self._real(request))
        return blocks.get_block_ids(), num_tokens

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
        """The new blocks for so many more tokens, or None if there are too few."""
        blocks: Any = self.manager.allocate_slots(
            self._real(request),
            num_new_tokens,
            num_new_computed_tokens=num_new_computed_tokens,
            new_computed_blocks=self._blocks(new_computed_blocks),
            num_lookahead_tokens=num_lookahead_tokens,
            full_sequence_must_fit=full_sequence_must_fit,
        )
        return None if blocks is None else blocks.get_block_ids()

    def free(self, request: FakeRequest) -> None:
        """Give the blocks of a request back."""
        self.manager.free(self._real(request))
        del self._requests[request.request_id]

    def get_block_ids(self, request_id: str) -> BlockIds:
        """The blocks of a request in each group."""
        ids: BlockIds = self.manager.get_block_ids(request_id)
        return ids

    def free_order(self) -> list[int]:
        """The free blocks, the next to be handed out first."""
        return [block.block_id for block in self.block_pool.free_block_queue.get_all_free_blocks()]

    def _real(self, request: FakeRequest) -> Any:
        """The real request with the fake one's tokens so far."""
        real = self._requests.get(request.request_id)
        if real is None:
            real = self._requests[request.request_id] = Request(
                request_id=request.request_id,
                prompt_token_ids=request.all_token_ids[: request.num_prompt_tokens],
                sampling_params=SamplingParams(max_tokens=request.max_tokens),
                pooling_params=None,
                block_hasher=self._hasher,
            )
        real.append_output_token_ids(request.all_token_ids[real.num_tokens :])
        real.num_computed_tokens = request.num_computed_tokens
        real.num_in_flight_tokens = request.num_in_flight_tokens
        return real

    def _blocks(self, ids: BlockIds | None) -> Any:
        if ids is None:
            return None
        return self.manager.create_kv_cache_blocks(
            tuple([self.block_pool.blocks[block] for block in group] for group in ids)
        )


def _groups(options: KVCacheOptions) -> list[KVCacheGroupSpec]:
    shape: Any = {
        "block_size": options.block_size,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    return [
        KVCacheGroupSpec(
            [f"layer {number}"],
            FullAttentionSpec(**shape)
            if window is None
            else SlidingWindowSpec(**shape, sliding_window=window),
        )
        for number, window in enumerate(options.sliding_windows)
    ]

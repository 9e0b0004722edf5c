"""Schedulers that derive from ours, as a user's may."""

from __future__ import annotations

from dataclasses import replace

from batchjob_scheduler.scheduler import BatchJobAwareAsyncScheduler, BatchJobAwareScheduler

USABLE_BLOCKS = 20


class AsyncOfAUser(BatchJobAwareAsyncScheduler):
    """Another name."""


class SmallPoolScheduler(BatchJobAwareScheduler):
    """Uses only the first blocks of the pool, so that the KV cache is smaller than its longest request.

    Newer engines refuse to start like that; with older ones, and with a pool that is partly held by
    something else, it happens. The workers have more blocks than this scheduler uses.
    """

    def __init__(self, *, kv_cache_config, **kwargs):
        # One more than usable: vLLM keeps a null block for itself.
        super().__init__(kv_cache_config=replace(kv_cache_config, num_blocks=USABLE_BLOCKS + 1), **kwargs)

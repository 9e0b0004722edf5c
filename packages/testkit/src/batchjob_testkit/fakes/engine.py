"""The engine as a waiting queue sees it: a KV cache and running requests."""

from __future__ import annotations

from collections.abc import Sequence

from batchjob_testkit.fakes.block_pool import FakeBlockPool
from batchjob_testkit.fakes.kv_cache_manager import FakeKVCacheManager
from batchjob_testkit.fakes.request import FakeRequest


class FakeEngine:
    """Runs requests on a fake KV cache, one event at a time.

    >>> engine = FakeEngine(usable_blocks=4)
    >>> engine.start(FakeRequest("1", num_prompt_tokens=20, max_tokens=8)), engine.free_blocks()
    (True, 2)
    """

    def __init__(
        self,
        usable_blocks: int,
        block_size: int = 16,
        step_tokens: int = 8192,
        lookahead_tokens: int = 0,
        max_running: int = 256,
        padding_tokens: int = 0,
    ) -> None:
        self.usable_blocks = usable_blocks
        self.block_size = block_size
        self.step_tokens = step_tokens
        self.lookahead_tokens = lookahead_tokens
        self.max_running = max_running
        self.padding_tokens = padding_tokens
        self.kv_cache_manager = FakeKVCacheManager(FakeBlockPool(usable_blocks + 1), block_size)
        self._running: list[FakeRequest] = []
        self._withheld: list[int] = []

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of the largest request that the empty pool can hold while it is computed."""
        return self.usable_blocks * self.block_size - self.padding_tokens - self.lookahead_tokens

    def free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return self.kv_cache_manager.block_pool.get_num_free_blocks()

    def running(self) -> Sequence[FakeRequest]:
        """The requests that run."""
        return self._running

    def withhold(self, num_blocks: int) -> None:
        """Let something else than a request hold exactly so many blocks, as far as they are free."""
        pool = self.kv_cache_manager.block_pool
        pool.free_blocks(self._withheld)
        self._withheld = pool.get_new_blocks(min(num_blocks, pool.get_num_free_blocks()))

    def start(self, request: FakeRequest) -> bool:
        """Run a request if its first step and all of its tokens find room."""
        if self.step(request, full_sequence_must_fit=True):
            self.run(request)
            return True
        return False

    def run(self, request: FakeRequest) -> None:
        """Count a request, whose tokens found room, among those that run."""
        self._running.append(request)

    def allocate(self, request: FakeRequest, new_tokens: int, full_sequence_must_fit: bool = False) -> bool:
        """Hold the blocks of a request's next tokens; whether there are enough."""
        blocks = self.kv_cache_manager.allocate_slots(
            request,
            new_tokens,
            num_lookahead_tokens=self.lookahead_tokens,
            full_sequence_must_fit=full_sequence_must_fit,
        )
        return blocks is not None

    def step(self, request: FakeRequest, full_sequence_must_fit: bool = False) -> bool:
        """Compute a request's next tokens if they find room; one that has caught up samples one."""
        new_tokens = min(request.num_tokens - request.num_computed_tokens, self.step_tokens)
        if not self.allocate(request, new_tokens, full_sequence_must_fit):
            return False
        request.num_computed_tokens += new_tokens
        if request.num_computed_tokens == request.num_tokens:
            request.num_output_tokens += 1
        return True

    def preempt(self, request: FakeRequest) -> None:
        """Stop running a request and drop its KV cache; the caller puts it back into its queue."""
        self.finish(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1

    def finish(self, request: FakeRequest) -> None:
        """Stop running a request for good."""
        if request in self._running:
            self._running.remove(request)
        self.kv_cache_manager.free(request)

    def check_integrity(self) -> None:
        """The KV cache's ledger is whole: what no request holds is free or withheld.

        Raises:
            AssertionError: with the ledger.
        """
        self.kv_cache_manager.check_integrity(held_by_others=self._withheld)

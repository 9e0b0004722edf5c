"""What any KV cache manager must answer, worked out from who holds which block and what is in it.

The ledger takes the numbers of the blocks from the manager under test and nothing else: it compares whole
prefixes, not hashes, and counts holders in block tables, not references.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

from batchjob_spec.blocks import blocks_for
from batchjob_testkit.fakes import BlockIds, FakeBlockPool, FakeKVCacheManager, FakeRequest
from batchjob_testkit.fakes.block_pool import NULL_BLOCK

EVICTION_ORDER: Final = "K7"
"""What a manager does not claim that may hand out a cached block while others are free."""

TOKENS_IN_FLIGHT: Final = "K8 of tokens in flight"
"""What a manager does not claim that forgets the steps whose result is not known yet."""


class BlockPool(Protocol):
    """The pool as a scheduler reads it."""

    def get_num_free_blocks(self) -> int:
        """How many blocks can be handed out now."""


class KVCacheManager(Protocol):
    """A KV cache manager under vLLM's names; blocks are numbers, and 0 is the null block.

    One that does not claim all rules names the rest in ``unclaimed``: :data:`EVICTION_ORDER` or
    :data:`TOKENS_IN_FLIGHT`.
    """

    @property
    def block_pool(self) -> BlockPool:
        """Where the blocks come from."""

    def get_computed_blocks(self, request: FakeRequest) -> tuple[BlockIds, int]:
        """The cached blocks that a request can begin with, and how many tokens they hold."""

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

    def free(self, request: FakeRequest) -> None:
        """Give the blocks of a request back."""

    def get_block_ids(self, request_id: str) -> BlockIds:
        """The blocks of a request in each group."""


@dataclass(frozen=True, kw_only=True)
class KVCacheOptions:
    """The KV cache that a manager is made for; ``num_gpu_blocks`` includes the null block.

    There is a KV cache group for each of ``sliding_windows``: full attention for None, else attention to
    so many last tokens.
    """

    num_gpu_blocks: int
    block_size: int = 4
    enable_caching: bool = False
    sliding_windows: tuple[int | None, ...] = (None,)
    max_model_len: int = 4096
    max_in_flight_tokens: int = 4096


KVManagerFactory = Callable[[KVCacheOptions], KVCacheManager]
"""Makes an empty KV cache manager."""


def make_fake_manager(
    options: KVCacheOptions, manager_cls: type[FakeKVCacheManager] = FakeKVCacheManager
) -> FakeKVCacheManager:
    """The fake KV cache manager, or a subclass of it, for these options."""
    return manager_cls(
        FakeBlockPool(options.num_gpu_blocks),
        options.block_size,
        enable_caching=options.enable_caching,
        sliding_windows=options.sliding_windows,
        max_model_len=options.max_model_len,
        max_in_flight_tokens=options.max_in_flight_tokens,
    )


class KVLedger:
    """Drives a manager with the moves of an engine and compares each of its answers with rules K1 to K8."""

    def __init__(self, make_manager: KVManagerFactory, options: KVCacheOptions) -> None:
        self.options = options
        self.manager = make_manager(options)
        self.unclaimed: frozenset[str] = getattr(self.manager, "unclaimed", frozenset())
        self.requests: dict[str, FakeRequest] = {}
        """The requests that hold blocks."""
        self._tables: dict[str, BlockIds] = {}
        self._contents: dict[int, tuple[int, tuple[int, ...]]] = {}
        """What each cached block stands for: its group, and all tokens up to its end."""
        self._freed_at: dict[int, tuple[int, int]] = {}
        """When each block that is cached and free was given back: the event, and the place within it."""
        self._history: list[str] = []

    # --- moves ------------------------------------------------------------------------------------

    def find(self, request: FakeRequest) -> int:
        """How many tokens a request need not compute."""
        return self._find(request)[1]

    def start(self, request: FakeRequest, tokens: int | None = None, **options: Any) -> bool:
        """Run a request that holds nothing, from what is cached on; False if it finds no room."""
        hits, num_hit_tokens = self._find(request)
        return self._compute(request, tokens, hits, num_hit_tokens, **options)

    def step(self, request: FakeRequest, tokens: int | None = None, **options: Any) -> bool:
        """Compute more of a running request; False if it finds no room."""
        return self._compute(request, tokens, self._no_blocks(), 0, **options)

    def end(self, request: FakeRequest) -> None:
        """A request gives up its blocks for good."""
        self._record(f"free({request.request_id})")
        self.manager.free(request)
        del self.requests[request.request_id]
        given_back = self._tables.pop(request.request_id)
        self._note_freed(block for table in given_back for block in reversed(table))
        self._check_all(f"free({request.request_id})")

    def preempt(self, request: FakeRequest) -> None:
        """A request gives up its blocks and has to compute its tokens again."""
        self.end(request)
        request.num_computed_tokens = request.num_in_flight_tokens = 0

    def free_blocks(self) -> int:
        """The free blocks as the manager counts them."""
        return self.manager.block_pool.get_num_free_blocks()

    def blocks_of(self, request: FakeRequest) -> BlockIds:
        """The blocks of a request."""
        return self.manager.get_block_ids(request.request_id)

    def _find(self, request: FakeRequest) -> tuple[BlockIds, int]:
        hits, num_tokens = self.manager.get_computed_blocks(request)
        self._record(f"get_computed_blocks({request.request_id}) -> {hits}, {num_tokens}")
        self._check_hits(request, hits, num_tokens)
        return hits, num_tokens

    def _compute(
        self,
        request: FakeRequest,
        tokens: int | None,
        hits: BlockIds,
        num_hit_tokens: int,
        *,
        drafts: int = 0,
        accepted: int = 0,
        lookahead: int = 0,
        whole: bool = False,
    ) -> bool:
        """Allocate for ``tokens`` tokens (None: all known ones), and count them as computed.

        When all are, one is sampled. Behind the last known token ``drafts`` are verified, too, of which
        ``accepted`` turn out right.
        """
        computed = request.num_computed_tokens + num_hit_tokens
        remaining = request.num_tokens - computed
        new_tokens = remaining if tokens is None else min(tokens, remaining)
        samples = new_tokens == remaining
        drafts = drafts if samples else 0
        if not self._allocate(request, new_tokens + drafts, hits, num_hit_tokens, lookahead, whole):
            return False
        self.requests[request.request_id] = request
        request.num_computed_tokens = computed + new_tokens
        if samples:
            request.num_computed_tokens += min(accepted, drafts)
            request.num_output_tokens += 1 + min(accepted, drafts)
        return True

    # --- what the rules say -------------------------------------------------------------------------

    def _allocate(
        self,
        request: FakeRequest,
        new_tokens: int,
        hits: BlockIds,
        num_hit_tokens: int,
        lookahead: int,
        whole: bool,
    ) -> bool:
        name, computed = request.request_id, request.num_computed_tokens + num_hit_tokens
        slots = min(computed + new_tokens + lookahead, self.options.max_model_len)
        begun = hits if any(hits) else self._tables.get(name, self._no_blocks())
        inside = self._inside_windows(begun, computed - request.num_in_flight_tokens)

        whole_fits = not whole or self._whole_sequence_fits(request, inside)
        held = self._held(self._tables | {name: inside})
        usable = self.options.num_gpu_blocks - 1
        tokens_fit = len(held) + self._growth(inside, slots) <= usable

        answer = self.manager.allocate_slots(
            request,
            new_tokens,
            num_new_computed_tokens=num_hit_tokens,
            new_computed_blocks=hits if any(hits) else None,
            num_lookahead_tokens=lookahead,
            full_sequence_must_fit=whole,
        )
        call = (
            f"allocate_slots({name}, {new_tokens}, cached {num_hit_tokens}, lookahead {lookahead}, {whole=})"
        )
        self._record(f"{call} -> {answer}")
        rule = "K4" if whole and tokens_fit else "K3"
        self._expect(rule, f"whether {call} is granted", answer is not None, whole_fits and tokens_fit)
        if answer is None:
            self._take_over_refusal(name, inside)
        else:
            self._take_over_grant(name, call, inside, slots, answer)
            if self.options.enable_caching:
                self._note_cached(request, min(computed + new_tokens, request.num_tokens))
        self._check_all(call)
        return answer is not None

    def _take_over_refusal(self, name: str, inside: BlockIds) -> None:
        """Nothing has changed, or only blocks out of the window were given back."""
        if name in self._tables:
            unchanged = self._tables[name]
            observed = self.manager.get_block_ids(name)
            if observed != unchanged:
                self._expect("K3", f"the blocks of {name} after a refusal", observed, inside)
                self._give_back(name, inside)

    def _take_over_grant(self, name: str, call: str, inside: BlockIds, slots: int, answer: BlockIds) -> None:
        self._give_back(name, inside)
        for block in self._held({name: inside}):
            self._freed_at.pop(block, None)
        held = self._held(self._tables)
        observed = self.manager.get_block_ids(name)
        kept = tuple(table[: len(before)] for table, before in zip(observed, inside, strict=True))
        rule = "K8" if any(self.options.sliding_windows) else "K1"
        self._expect(rule, f"the blocks that {name} had before {call}", kept, inside)
        new = tuple(table[len(before) :] for table, before in zip(observed, inside, strict=True))
        lengths = [max(len(before), self._blocks_for(slots)) for before in inside]
        self._expect(
            "K1", f"blocks of {name}, a group each, after {call}", [len(t) for t in observed], lengths
        )
        self._expect("K1", f"the answer to {call}", answer, new)
        taken = [block for table in new for block in table]
        twice = sorted({block for block in taken if block in held or taken.count(block) > 1})
        self._expect("K5", f"blocks that {call} took and that are held already", twice, [])
        self._expect("K5", f"whether {call} took the null block", NULL_BLOCK in taken, False)
        self._check_evictions(call, taken, held)
        self._tables[name] = observed

    def _check_evictions(self, call: str, taken: list[int], held: Collection[int]) -> None:
        """K7: blocks that cache nothing go first, then those that were given back longest ago."""
        evicted = [block for block in taken if block in self._freed_at]
        spared = self._freed_at.keys() - set(evicted)
        if evicted and EVICTION_ORDER not in self.unclaimed:
            blank = (
                set(range(1, self.options.num_gpu_blocks)) - set(held) - self._freed_at.keys() - set(taken)
            )
            self._expect("K7", f"free blocks that cache nothing and were spared by {call}", sorted(blank), [])
            sooner = sorted(b for b in spared if any(self._was_given_back_before(b, e) for e in evicted))
            self._expect("K7", f"blocks given back before those that {call} evicted: {evicted}", sooner, [])
        for block in taken:
            self._contents.pop(block, None)
            self._freed_at.pop(block, None)

    def _was_given_back_before(self, block: int, other: int) -> bool:
        """Which group gives its blocks back first in one event is not laid down."""
        (event, place), (other_event, other_place) = self._freed_at[block], self._freed_at[other]
        same_group = self._contents[block][0] == self._contents[other][0]
        return event < other_event or (event == other_event and same_group and place < other_place)

    def _check_hits(self, request: FakeRequest, hits: BlockIds, num_tokens: int) -> None:
        """K6 and K8: the longest run of cached blocks, as far as they are attended to, with a token left."""
        tokens, size = request.all_token_ids, self.options.block_size
        cached = set(self._contents.values())

        def attended(group: int, length: int) -> range:
            window = self.options.sliding_windows[group]
            first = 0 if window is None else max(0, length - self._blocks_for(window - 1))
            return range(first, length)

        def prefix(group: int, position: int) -> tuple[int, tuple[int, ...]]:
            return group, tuple(tokens[: (position + 1) * size])

        groups = range(len(self.options.sliding_windows))
        longest = next(
            length
            for length in range((len(tokens) - 1) // size, -1, -1)
            if all(prefix(g, p) in cached for g in groups for p in attended(g, length))
        )
        longest *= self.options.enable_caching
        what = f"cached tokens of {request.request_id}"
        self._expect("K6", what, num_tokens, longest * size)
        self._expect(
            "K6", f"blocks, a group each, of the {what}", [len(h) for h in hits], [longest for _ in hits]
        )
        for group, blocks in enumerate(hits):
            for position, block in enumerate(blocks):
                wanted = prefix(group, position) if position in attended(group, longest) else None
                found = self._contents.get(block)
                self._expect("K6", f"what is in block {block}, found at {position} of {what}", found, wanted)

    def _whole_sequence_fits(self, request: FakeRequest, inside: BlockIds) -> bool:
        """K4: room for all tokens, or in a window for as many as it can hold while a step is computed."""
        held = self._held(self._tables)
        hits = self._held({request.request_id: inside}) - held
        limit = self.options.max_in_flight_tokens
        growth = 0
        for window, table in zip(self.options.sliding_windows, inside, strict=True):
            blocks = self._blocks_for(min(request.num_tokens, self.options.max_model_len))
            if window is not None:
                most = self._blocks_for(min(window - 1 + limit, self.options.max_model_len)) + 1
                blocks = min(blocks, most)
            growth += max(0, blocks - len(table))
        return len(held) + len(hits) + growth <= self.options.num_gpu_blocks - 1

    def _growth(self, tables: BlockIds, tokens: int) -> int:
        return sum(max(0, self._blocks_for(tokens) - len(table)) for table in tables)

    def _inside_windows(self, tables: BlockIds, computed_tokens: int) -> BlockIds:
        """The tables with null blocks where no later token attends."""
        inside = []
        for window, table in zip(self.options.sliding_windows, tables, strict=True):
            passed = (
                0 if window is None else max(0, computed_tokens - (window - 1)) // self.options.block_size
            )
            passed = min(passed, len(table))
            inside.append([NULL_BLOCK] * passed + list(table[passed:]))
        return tuple(inside)

    def _blocks_for(self, tokens: int) -> int:
        return blocks_for(tokens, self.options.block_size)

    # --- the books ----------------------------------------------------------------------------------

    def _give_back(self, name: str, inside: BlockIds) -> None:
        """A request keeps only what is inside its windows."""
        before = self._tables.get(name, self._no_blocks())
        self._tables[name] = inside
        self._note_freed(
            block
            for old, new in zip(before, inside, strict=True)
            for block in reversed(old)
            if block not in new
        )

    def _note_freed(self, blocks: Iterable[int]) -> None:
        held = self._held(self._tables)
        for place, block in enumerate(blocks):
            if block in self._contents and block not in held:
                self._freed_at[block] = len(self._history), place

    def _note_cached(self, request: FakeRequest, num_tokens: int) -> None:
        tokens = request.all_token_ids
        for group, table in enumerate(self._tables[request.request_id]):
            for position, block in enumerate(table[: num_tokens // self.options.block_size]):
                if block != NULL_BLOCK:
                    self._contents[block] = group, tuple(tokens[: (position + 1) * self.options.block_size])

    def _check_all(self, event: str) -> None:
        for name, table in self._tables.items():
            self._expect("K5", f"the blocks of {name} after {event}", self.manager.get_block_ids(name), table)
        free = self.options.num_gpu_blocks - 1 - len(self._held(self._tables))
        self._expect("K2", f"free blocks after {event}", self.free_blocks(), free)

    def _held(self, tables: dict[str, BlockIds]) -> set[int]:
        return {block for groups in tables.values() for table in groups for block in table} - {NULL_BLOCK}

    def _no_blocks(self) -> BlockIds:
        return tuple([] for _ in self.options.sliding_windows)

    def _record(self, event: str) -> None:
        self._history.append(event)

    def _expect(self, rule: str, what: str, observed: object, expected: object) -> None:
        if observed != expected:
            self._fail(f"{rule}: {what}: {observed}, expected {expected}")

    def _fail(self, message: str) -> NoReturn:
        history = "\n".join(f"    {event}" for event in self._history)
        raise AssertionError(
            f"{message}\n  {self.options}\n  history:\n{history}\n"
            f"  blocks held, a list for each group: {self._tables}\n"
            f"  cached and free: {sorted(self._freed_at, key=self._freed_at.__getitem__)}"
        )

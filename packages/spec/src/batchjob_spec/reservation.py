"""Rules V1 to V5: which part of the KV cache is kept for what runs, and what fits beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from batchjob_spec.blocks import blocks_added, blocks_for

LOOK_AHEAD_TOKENS = 256
"""V5: how far ahead the peak is predicted, in tokens of each request."""


def tokens_computed_next(computed_tokens: int, known_tokens: int, step_tokens: int) -> int:
    """V1: the tokens that one step computes of a request, what is left of them within the step's limit.

    A long prompt is computed in chunks, so that what decodes beside it need not wait for all of it.

    >>> tokens_computed_next(0, 96, step_tokens=32), tokens_computed_next(95, 96, step_tokens=32)
    (32, 1)

    pre: 0 <= computed_tokens <= known_tokens
    pre: step_tokens >= 1
    post: 0 <= __return__ <= step_tokens
    post: computed_tokens + __return__ <= known_tokens
    """
    return min(known_tokens - computed_tokens, step_tokens)


def next_step_blocks(
    computed_tokens: int,
    known_tokens: int,
    step_tokens: int,
    lookahead_tokens: int,
    block_size: int,
) -> int:
    """V1: the blocks that a running request adds in the step after the current one.

    The current step has its blocks already. It computes what the step's limit lets it; a request
    whose prompt is then complete has sampled one more token, which the next step computes.
    ``known_tokens`` is prompt and output, ``lookahead_tokens`` the slots that speculative decoding
    asks for on top.

    >>> next_step_blocks(31, 32, step_tokens=512, lookahead_tokens=0, block_size=16)
    1
    >>> next_step_blocks(32, 33, step_tokens=512, lookahead_tokens=0, block_size=16)
    0
    >>> next_step_blocks(0, 96, step_tokens=32, lookahead_tokens=0, block_size=16)
    2

    pre: 0 <= computed_tokens <= known_tokens
    pre: step_tokens >= 1
    pre: lookahead_tokens >= 0
    pre: block_size >= 1
    post: 0 <= __return__ <= step_tokens
    """
    computed_after = computed_tokens + tokens_computed_next(computed_tokens, known_tokens, step_tokens)
    known_after = known_tokens + 1 if computed_after == known_tokens else known_tokens
    next_tokens = tokens_computed_next(computed_after, known_after, step_tokens)
    return blocks_added(computed_after + lookahead_tokens, next_tokens, block_size)


def reserve_blocks(running_blocks: int, margin_blocks: int, max_blocks: int) -> int:
    """V2: the blocks kept free for what runs: its need and a margin, up to a limit.

    Were they given to new work, a running request would find no block for its next token, and one would
    be preempted and computed a second time. Beyond the limit memory would lie idle.

    >>> reserve_blocks(3, 2, 8), reserve_blocks(40, 2, 8)
    (5, 8)

    pre: running_blocks >= 0
    pre: margin_blocks >= 0
    pre: max_blocks >= 0
    post: 0 <= __return__ <= max_blocks
    post: __return__ == running_blocks + margin_blocks or __return__ == max_blocks
    """
    return min(running_blocks + margin_blocks, max_blocks)


def budget_tokens(free_blocks: int, reserved_blocks: int, block_size: int) -> int:
    """V3: the tokens that new work may take: the free blocks less the reserve, never negative.

    Less may be free than is reserved, because the running requests take what was kept for them.

    >>> budget_tokens(10, 8, 16), budget_tokens(3, 8, 16)
    (32, 0)

    pre: free_blocks >= 0
    pre: reserved_blocks >= 0
    pre: block_size >= 1
    post: 0 <= __return__ <= free_blocks * block_size
    """
    return max(0, free_blocks - reserved_blocks) * block_size


def need_tokens(prompt_tokens: int, output_tokens: int, computed_tokens: int) -> int:
    """V4: what a waiting request has to compute before it can decode.

    A preempted request computes its output so far a second time. ``computed_tokens`` is what is
    known to be in the KV cache already.

    >>> need_tokens(60, 0, computed_tokens=0), need_tokens(60, 7, computed_tokens=32)
    (60, 35)

    pre: prompt_tokens >= 1
    pre: output_tokens >= 0
    pre: 0 <= computed_tokens <= prompt_tokens + output_tokens
    post: 0 <= __return__ <= prompt_tokens + output_tokens
    """
    return prompt_tokens + output_tokens - computed_tokens


STARTS_TO_KNOW_A_PREFIX = 3
"""V4: so many requests of a job must have found a prefix in the cache, one after the other."""


def shared_tokens(found: Sequence[int]) -> int:
    """V4: what the next request of a job shares: the least that the last ones to start found in the cache.

    >>> shared_tokens([0, 64, 96, 64]), shared_tokens([64, 64])
    (64, 0)

    pre: all(tokens >= 0 for tokens in found)
    post: __return__ >= 0
    """
    last = found[-STARTS_TO_KNOW_A_PREFIX:]
    return min(last) if len(last) == STARTS_TO_KNOW_A_PREFIX else 0


def charged_tokens(need: int, shared: int) -> int:
    """V4: the need less what is shared, and at least one token of it, which is always computed.

    >>> charged_tokens(100, shared=64), charged_tokens(60, shared=64), charged_tokens(60, shared=0)
    (36, 1, 60)

    pre: need >= 0
    pre: shared >= 0
    post: __return__ <= need
    post: __return__ >= 0
    """
    return max(min(need, 1), need - shared)


def fits(need: int, budget: int, block_size: int) -> bool:
    """V4: whether ``need`` tokens, counted in whole blocks, are within ``budget`` tokens.

    The engine hands out whole blocks, so what fits by tokens alone may find no room.

    >>> fits(32, 32, 16), fits(33, 47, 16)
    (True, False)

    pre: need >= 0
    pre: budget >= 0
    pre: block_size >= 1
    post: not __return__ or need <= budget
    """
    return blocks_for(need, block_size) * block_size <= budget


def attainable_tokens(free_blocks: int, running_blocks: int, block_size: int) -> int:
    """V5: what the running requests and a new one may hold together: theirs and what is free.

    A twentieth of it is left alone, since predictions err.

    >>> attainable_tokens(free_blocks=30, running_blocks=70, block_size=16)
    1520

    pre: free_blocks >= 0
    pre: running_blocks >= 0
    pre: block_size >= 1
    post: 0 <= __return__ <= (free_blocks + running_blocks) * block_size
    """
    return (free_blocks + running_blocks) * block_size * 19 // 20


def within_look_ahead(remaining: int) -> int:
    """V5: how far ahead the peak is predicted, at least one token and at most the look-ahead.

    Further ahead the prediction is worth less than the memory that it would leave idle: a request
    that is preempted after so many tokens has paid for computing its prompt once more.

    >>> within_look_ahead(2000), within_look_ahead(5), within_look_ahead(0)
    (256, 5, 1)

    post: 1 <= __return__ <= LOOK_AHEAD_TOKENS
    post: __return__ in (remaining, 1, LOOK_AHEAD_TOKENS)
    """
    return max(1, min(remaining, LOOK_AHEAD_TOKENS))


def predicted_peak_tokens(running: Iterable[tuple[int, int]], candidate: tuple[int, int]) -> int:
    """V5: the most that all hold together at the end of one of them, until the candidate has ended.

    Each is ``(held, remaining)`` in tokens. Sorted by remaining length, longest first, those still
    there when the i-th ends hold ``sum(held of the first i) + i * remaining of the i-th``. What is
    after the candidate's own end is not its doing.

    >>> predicted_peak_tokens([(100, 10)], candidate=(50, 4))   # it ends first: 150 + 2 * 4
    158
    >>> predicted_peak_tokens([(100, 10)], candidate=(50, 30))  # when the other ends: 150 + 2 * 10
    170
    """
    peak = held_together = 0
    ordered = sorted([*running, candidate], key=lambda member: member[1], reverse=True)
    for count, (held, remaining) in enumerate(ordered, start=1):
        held_together += held
        if remaining <= candidate[1]:
            peak = max(peak, held_together + count * remaining)
    return peak

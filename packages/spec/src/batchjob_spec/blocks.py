"""Tokens and blocks: a block holds ``block_size`` tokens, and blocks are handed out whole."""

from __future__ import annotations


def blocks_for(tokens: int, block_size: int) -> int:
    """The blocks that ``tokens`` tokens occupy; the last one may be partly empty.

    >>> blocks_for(33, 16), blocks_for(32, 16), blocks_for(0, 16)
    (3, 2, 0)

    pre: tokens >= 0
    pre: block_size >= 1
    post: tokens <= __return__ * block_size < tokens + block_size
    """
    return -(-tokens // block_size)


def blocks_added(held_tokens: int, tokens: int, block_size: int) -> int:
    """The blocks that a request with ``held_tokens`` tokens needs on top to hold ``tokens`` more.

    Its last block may have room for them, so most decoded tokens need none.

    >>> blocks_added(15, 1, 16), blocks_added(16, 1, 16)
    (0, 1)

    pre: held_tokens >= 0
    pre: tokens >= 0
    pre: block_size >= 1
    post: __return__ >= 0
    post: __return__ <= tokens
    """
    return blocks_for(held_tokens + tokens, block_size) - blocks_for(held_tokens, block_size)

"""What an engine under test looks like: its limits, what may be asked of it, and how a request ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

STOP_TOKEN: Final = 1
"""The token on which every request stops."""

MAX_IDLE_STEPS: Final = 20
"""An engine that schedules nothing in so many steps in a row is taken to be stuck."""


def sampled_token(position: int, decode_tokens: int) -> int:
    """The output token at ``position``, from 1, of a request that stops after ``decode_tokens``.

    No two positions share a token, so one that is lost or doubled is seen.

    >>> [sampled_token(position, 3) for position in (1, 2, 3)]
    [101, 102, 1]
    """
    return STOP_TOKEN if position == decode_tokens else 100 + position


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What bounds an engine, under vLLM's names; ``num_blocks`` includes the null block.

    >>> EngineLimits(num_blocks=5).usable_blocks
    4
    """

    num_blocks: int = 1001
    block_size: int = 16
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
    policy: str = "fcfs"
    enable_chunked_prefill: bool = True

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold."""
        return self.num_blocks - 1


@dataclass(frozen=True)
class Outcome:
    """How a request ended: its tokens, its finish reason as vLLM names it, and a stop reason."""

    tokens: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None


class NoProgressError(AssertionError):
    """The scheduler computed nothing for many steps although requests are unfinished."""


class EngineCore(Protocol):
    """An engine core that pretends to compute: it takes requests, steps, and answers."""

    answers: list[tuple[str, Outcome]]
    """Each answer given, in order, as the request's ID and how it ended."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""

    @property
    def running_ids(self) -> Sequence[str]:
        """The requests that run; those that were preempted do not."""

    def submit(
        self,
        request_id: str,
        prompt_tokens: int,
        decode_tokens: int,
        *,
        max_tokens: int | None = None,
        priority: int = 0,
    ) -> Any:
        """A request arrives whose output token at each position is :func:`sampled_token`."""

    def abort(self, request_id: str) -> None:
        """The client goes away; of a request that is unknown or over, nothing changes."""

    def step(self) -> dict[str, int]:
        """One step; returns the tokens that it scheduled per request."""

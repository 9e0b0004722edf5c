"""What the engine-free parts ask of an engine. The names of a request are vLLM's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Request(Protocol):
    """The part of vLLM's request that the queue reads."""

    request_id: str
    priority: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_placeholders: int
    num_preemptions: int
    max_tokens: int
    sampling_params: Any | None

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""

    @property
    def num_output_tokens(self) -> int:
        """Output so far."""


class EngineView(Protocol):
    """The KV cache and the running requests, as they are at the moment of the call."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of the largest request that the empty pool can hold while it is computed."""

    @property
    def step_tokens(self) -> int:
        """The most tokens that one step computes."""

    @property
    def max_running(self) -> int:
        """The most requests that run at a time."""

    @property
    def lookahead_tokens(self) -> int:
        """Slots that speculative decoding asks for beyond a request's tokens."""

    def free_blocks(self) -> int:
        """Blocks that can be allocated now."""

    def running(self) -> Sequence[Request]:
        """The requests that run."""

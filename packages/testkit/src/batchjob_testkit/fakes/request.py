"""A request with the attributes of vLLM's that a queue reads, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeSamplingParams:
    """The part of vLLM's sampling parameters that a queue reads."""

    min_tokens: int = 0
    extra_args: dict[str, Any] | None = None


@dataclass(eq=False)
class FakeRequest:
    """A request of ``num_prompt_tokens`` tokens that may decode up to ``max_tokens``.

    Without ``prompt_token_ids`` its tokens are such as no other request has.

    >>> request = FakeRequest("#job_name[news]#1", num_prompt_tokens=30, max_tokens=8)
    >>> request.num_output_tokens = 2
    >>> request.num_tokens
    32
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int = 0
    sampling_params: FakeSamplingParams | None = field(default_factory=FakeSamplingParams)
    arrival_time: float = 0.0
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    num_preemptions: int = 0
    num_in_flight_tokens: int = 0
    prompt_token_ids: list[int] | None = None
    block_hashes: list[bytes] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        ids = self.prompt_token_ids
        if ids is not None and len(ids) != self.num_prompt_tokens:
            raise ValueError(
                f"prompt_token_ids are {len(ids)}; num_prompt_tokens is {self.num_prompt_tokens}"
            )

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def all_token_ids(self) -> list[int]:
        """The tokens of prompt and output so far; output tokens are such as no other request has."""
        own_token = int.from_bytes(self.request_id.encode(), "big")
        prompt = self.prompt_token_ids
        if prompt is None:
            prompt = [own_token] * self.num_prompt_tokens
        return prompt + [own_token] * self.num_output_tokens

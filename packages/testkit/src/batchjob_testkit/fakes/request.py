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

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return self.num_prompt_tokens + self.num_output_tokens

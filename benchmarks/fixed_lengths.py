"""Ends each answer after as many tokens as its request says, which no scheduler is told."""

from __future__ import annotations

from typing import Any, Final

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

LENGTH: Final = "ends_after"
"""The extra argument of a request that names the tokens of its answer, with the end token."""


class EndsAfter(AdapterLogitsProcessor):
    """No end token before the last token of an answer, and no other there."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._end: int = vllm_config.model_config.hf_config.eos_token_id

    def is_argmax_invariant(self) -> bool:
        """It alters what greedy decoding picks."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor:
        """For one request."""
        last = params.extra_args[LENGTH] - 1
        end = self._end

        def at_its_length(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output) < last:
                logits[end] = -torch.inf
                return logits
            return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor([end]), 0.0)

        return at_its_length

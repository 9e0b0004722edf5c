"""What stands in for vLLM's model runner: it answers a scheduled step from an oracle, without a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from batchjob_testkit.engines import sampled_token


@dataclass(frozen=True)
class ComputedStep:
    """A step that was scheduled and computed, and whose output the scheduler has not seen yet."""

    scheduled: Any
    output: ModelRunnerOutput
    in_flight: Counter[tuple[str, int]]
    """The tokens sampled for each request, after so many preemptions of it."""


class FakeModelRunner:
    """Samples :func:`sampled_token` of each request and accepts some of its draft tokens."""

    def __init__(self, requests: Mapping[str, Request]) -> None:
        self.decode_tokens: dict[str, int] = {}
        """After how many tokens each request stops; a session, in its present turn."""
        self._requests = requests
        self._in_flight: Counter[tuple[str, int]] = Counter()

    def compute(self, scheduled: Any, transfers: Any) -> ComputedStep:
        """Compute a scheduled step; ``transfers`` is what the KV connector reports with it."""
        names = list(scheduled.num_scheduled_tokens)
        requests = [self._requests[name] for name in names]
        pooling = any(request.pooling_params for request in requests)
        sampled: list[list[int]] = []
        in_flight: Counter[tuple[str, int]] = Counter()
        for request in requests if not pooling else ():
            drafts = scheduled.scheduled_spec_decode_tokens.get(request.request_id, ())
            tokens = [] if request.is_prefill_chunk else self._sample(request, len(drafts))
            sampled.append(tokens)
            in_flight[request.request_id, request.num_preemptions] += len(tokens)
        self._in_flight += in_flight
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: position for position, name in enumerate(names)},
            sampled_token_ids=sampled,
            pooler_output=[_pooled(request) for request in requests] if pooling else None,
            kv_connector_output=transfers,
        )
        return ComputedStep(scheduled, output, in_flight)

    def hand_over(self, step: ComputedStep) -> ModelRunnerOutput:
        """The output of a step that the scheduler takes in now."""
        self._in_flight -= step.in_flight
        return step.output

    def drafts(self, step: ComputedStep, count: int) -> DraftTokenIds:
        """Draft tokens for every request of a step."""
        return DraftTokenIds(list(step.output.req_ids), [[0] * count for _ in step.output.req_ids])

    def _sample(self, request: Request, drafts: int) -> list[int]:
        # What was in flight at a preemption either arrives before the request resumes or is dropped.
        name = request.request_id
        first = request.num_output_tokens + self._in_flight[name, request.num_preemptions] + 1
        accepted = first % (drafts + 1)
        return [
            sampled_token(position, self.decode_tokens[name])
            for position in range(first, first + accepted + 1)
        ]


def _pooled(request: Request) -> torch.Tensor | None:
    return None if request.is_prefill_chunk else torch.zeros(1)

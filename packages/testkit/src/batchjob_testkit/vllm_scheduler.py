"""vLLM's real scheduler and KV cache manager, driven on CPU without a model.

A fake model runner answers each step from an oracle that knows how long every request decodes.
Needs vLLM; nothing is downloaded and no weights are loaded.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from batchjob_testkit.engines import (
    MAX_IDLE_STEPS,
    STOP_TOKEN,
    EngineLimits,
    NoProgressError,
    Outcome,
    sampled_token,
)

_MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "torch_dtype": "float16",
}


@dataclass(frozen=True, kw_only=True)
class EngineOptions(EngineLimits):
    """The engine around the scheduler."""

    async_scheduling: bool = False
    enable_prefix_caching: bool = False
    additional_config: dict[str, Any] = field(default_factory=dict)
    scheduler_config: dict[str, Any] = field(default_factory=dict)


def make_vllm_config(options: EngineOptions) -> VllmConfig:
    """The engine configuration of a small dense model on CPU."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL_CONFIG), encoding="utf-8")
        model_config = ModelConfig(
            model=folder,
            dtype="float16",
            skip_tokenizer_init=True,
            max_model_len=options.max_model_len,
        )
    cache_config = CacheConfig(
        block_size=options.block_size,
        gpu_memory_utilization=0.9,
        enable_prefix_caching=options.enable_prefix_caching,
    )
    vllm_config = VllmConfig(
        model_config=model_config,
        cache_config=cache_config,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            enable_chunked_prefill=options.enable_chunked_prefill,
            async_scheduling=options.async_scheduling,
            policy=options.policy,
            is_encoder_decoder=False,
            **options.scheduler_config,
        ),
        additional_config=options.additional_config,
    )
    # The CPU platform may have set both to what suits it.
    cache_config.block_size = options.block_size
    cache_config.num_gpu_blocks = options.num_blocks
    vllm_config.scheduler_config.async_scheduling = options.async_scheduling
    return vllm_config


def make_scheduler(scheduler_cls: type[Any], options: EngineOptions) -> Any:
    """A scheduler of that class with its own KV cache manager, as the engine core makes it."""
    vllm_config = make_vllm_config(options)
    register_all_kvcache_specs(vllm_config)
    group = KVCacheGroupSpec(
        ["layer"],
        FullAttentionSpec(block_size=options.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32),
    )
    return scheduler_cls(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(options.num_blocks, [], [group]),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=options.block_size,
        log_stats=True,
    )


class VirtualEngine:
    """An engine core that schedules, pretends to compute, and collects what comes out.

    With ``async_scheduling`` the next step is scheduled before the last one's tokens are known.
    """

    def __init__(self, scheduler_cls: type[Any], options: EngineOptions | None = None) -> None:
        self.options = options or EngineOptions()
        self.scheduler = make_scheduler(scheduler_cls, self.options)
        self.steps: list[dict[str, int]] = []
        """The tokens scheduled per request, a step each."""
        self.outcomes: dict[str, Outcome] = {}
        self.answers: list[tuple[str, Outcome]] = []
        self.requests: dict[str, Request] = {}
        self._decode_tokens: dict[str, int] = {}
        self._tokens: dict[str, list[int]] = {}
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._pending: Counter[str] = Counter()
        init_none_hash(sha256)
        self._block_hasher = (
            get_request_block_hasher(self.options.block_size, sha256)
            if self.options.enable_prefix_caching
            else None
        )

    @property
    def num_preemptions(self) -> int:
        """Preemptions of all requests."""
        return sum(request.num_preemptions for request in self.requests.values())

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    @property
    def running_ids(self) -> list[str]:
        """The requests that run."""
        return [request.request_id for request in self.scheduler.running]

    def submit(
        self,
        request_id: str,
        prompt_tokens: int | list[int],
        decode_tokens: int,
        *,
        max_tokens: int | None = None,
        priority: int = 0,
        **sampling: Any,
    ) -> Request:
        """A request arrives that decodes ``decode_tokens`` tokens, the last of them a stop token.

        With a smaller ``max_tokens`` it ends there, by its length cap.
        """
        if isinstance(prompt_tokens, int):
            first = 1000 + len(self.requests)
            prompt_tokens = [first] * prompt_tokens
        params = SamplingParams(
            max_tokens=max_tokens or decode_tokens, stop_token_ids=[STOP_TOKEN], **sampling
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt_tokens,
            sampling_params=params,
            pooling_params=None,
            priority=priority,
            arrival_time=float(len(self.requests)),
            block_hasher=self._block_hasher,
        )
        self.requests[request_id] = request
        self._decode_tokens[request_id] = decode_tokens
        self._tokens[request_id] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """The client goes away; of a request that is unknown or over, nothing changes."""
        if request_id in self.requests and request_id not in self.outcomes:
            self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            self._answer(request_id, "abort", None)

    def step(self) -> dict[str, int]:
        """One step of the engine; returns the tokens that it scheduled per request."""
        output = self.scheduler.schedule()
        self.steps.append(dict(output.num_scheduled_tokens))
        self._in_flight.append((output, self._compute(output)))
        depth = 2 if self.options.async_scheduling else 1
        if len(self._in_flight) >= depth or not output.num_scheduled_tokens:
            self._take_in()
        return self.steps[-1]

    def run(self, *, max_idle_steps: int = MAX_IDLE_STEPS, max_steps: int = 100_000) -> None:
        """Step until every request has ended.

        Raises:
            NoProgressError: with the state, if that does not happen.
        """
        idle = 0
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                break
            idle = 0 if self.step() else idle + 1
            if idle > max_idle_steps:
                break
        while self._in_flight:
            self._take_in()
        if self.scheduler.has_unfinished_requests():
            raise NoProgressError(f"after {len(self.steps)} steps: {self.describe()}")
        self.scheduler.schedule()  # lets the scheduler settle what ended last

    def describe(self) -> str:
        """What runs, what waits and what is free, in one line."""
        running, waiting = self.scheduler.get_request_counts()
        free = f"{self.num_free_blocks} of {self.options.usable_blocks} blocks free"
        return f"{running} running and {waiting} waiting requests, {free}"

    def check_integrity(self) -> None:
        """Every request has one outcome, and no block is held after all have ended.

        Raises:
            AssertionError: with both sides.
        """
        assert self.outcomes.keys() == self.requests.keys(), (
            f"without an outcome: {self.requests.keys() - self.outcomes.keys()}"
        )
        usable = self.options.usable_blocks
        assert self.num_free_blocks == usable, f"{self.num_free_blocks} of {usable} blocks are free"
        assert not self.scheduler.requests, f"the scheduler keeps {list(self.scheduler.requests)}"

    def _compute(self, output: Any) -> ModelRunnerOutput:
        names = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in names:
            request = self.requests[name]
            if request.is_prefill_chunk:
                sampled.append([])
                continue
            position = request.num_output_tokens + self._pending[name] + 1
            self._pending[name] += 1
            sampled.append([sampled_token(position, self._decode_tokens[name])])
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: position for position, name in enumerate(names)},
            sampled_token_ids=sampled,
        )

    def _take_in(self) -> None:
        output, computed = self._in_flight.popleft()
        for name, tokens in zip(computed.req_ids, computed.sampled_token_ids, strict=True):
            self._pending[name] -= len(tokens)
        for of_client in self.scheduler.update_from_output(output, computed).values():
            for result in of_client.outputs:
                self._tokens[result.request_id] += result.new_token_ids
                if result.finish_reason is not None:
                    self._answer(result.request_id, str(result.finish_reason), result.stop_reason)

    def _answer(self, name: str, finish_reason: str, stop_reason: int | str | None) -> None:
        assert name not in self.outcomes, f"{name} was answered twice"
        outcome = Outcome(tuple(self._tokens[name]), finish_reason, stop_reason)
        self.outcomes[name] = outcome
        self.answers.append((name, outcome))

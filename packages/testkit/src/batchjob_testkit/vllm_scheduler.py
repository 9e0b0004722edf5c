"""vLLM's real scheduler and KV cache manager, driven on CPU without a model.

A fake model runner answers each step from an oracle that knows how long every request decodes.
Needs vLLM; nothing is downloaded and no weights are loaded.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import lcm
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from batchjob_testkit.engines import (
    MAX_IDLE_STEPS,
    STOP_TOKEN,
    EngineLimits,
    NoProgressError,
    Outcome,
)
from batchjob_testkit.vllm_model_runner import ComputedStep, FakeModelRunner

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
    batches_in_flight: int | None = None
    """Steps that are scheduled before the first one's output is known; None: what the engine does."""
    kv_groups: tuple[str, ...] = ("full",)
    """The kind of each KV cache group: ``full``, ``window:TOKENS`` or ``mamba``."""
    runner: str = "generate"
    speculative_tokens: int = 0
    """Draft tokens a step."""
    speculative_method: str = "draft_model"
    """Where they come from: a draft model asks for as many look-ahead slots, ``ngram`` for none."""
    max_loras: int = 0
    kv_load_failure_policy: str | None = None
    """With one, requests may load and send KV blocks through the scripted connector."""
    encoder_tokens: int = 0
    """The encoder's budget for a step and the size of its cache."""
    additional_config: dict[str, Any] = field(default_factory=dict)
    scheduler_config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What else a request may ask for."""

    adapter: int = 0
    """The number of a LoRA adapter, from 1."""
    encoder_inputs: tuple[tuple[int, int], ...] = ()
    """Offset and length in the prompt of what an encoder computes."""
    structured: bool = False
    """It waits until :meth:`VirtualEngine.compile_grammar`."""
    session: bool = False
    """It waits for its next turn after each, until :meth:`VirtualEngine.end_session`."""
    kv_transfer: dict[str, Any] | None = None
    """The script of the KV connector, see :mod:`batchjob_testkit.vllm_kv_connector`."""


def make_vllm_config(options: EngineOptions) -> VllmConfig:
    """The engine configuration of a small dense model on CPU."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL_CONFIG), encoding="utf-8")
        model_config = ModelConfig(
            model=folder,
            dtype="float16",
            skip_tokenizer_init=True,
            max_model_len=options.max_model_len,
            runner=options.runner,
        )
        speculative_config = _speculative_config(options, model_config, folder)
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
        speculative_config=speculative_config,
        lora_config=LoRAConfig(max_loras=options.max_loras) if options.max_loras else None,
        kv_transfer_config=_kv_transfer_config(options),
        additional_config=options.additional_config,
    )
    # The CPU platform may have set both to what suits it.
    cache_config.block_size = options.block_size
    cache_config.num_gpu_blocks = options.num_blocks
    vllm_config.scheduler_config.async_scheduling = options.async_scheduling
    return vllm_config


def _speculative_config(
    options: EngineOptions, model_config: ModelConfig, folder: str
) -> SpeculativeConfig | None:
    if not options.speculative_tokens:
        return None
    of_method: dict[str, dict[str, Any]] = {
        "draft_model": {"model": folder},
        "ngram": {"prompt_lookup_max": 4},
    }
    return SpeculativeConfig(
        method=options.speculative_method,
        **of_method[options.speculative_method],
        num_speculative_tokens=options.speculative_tokens,
        target_model_config=model_config,
        target_parallel_config=ParallelConfig(),
    )


def _kv_transfer_config(options: EngineOptions) -> KVTransferConfig | None:
    if options.kv_load_failure_policy is None:
        return None
    return KVTransferConfig(
        kv_connector="ScriptedConnector",
        kv_connector_module_path="batchjob_testkit.vllm_kv_connector",
        kv_role="kv_both",
        kv_load_failure_policy=options.kv_load_failure_policy,
    )


def _kv_group(kind: str, options: EngineOptions) -> KVCacheGroupSpec:
    shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    name, _, window = kind.partition(":")
    spec = {
        "full": lambda: FullAttentionSpec(block_size=options.block_size, **shape),
        "window": lambda: SlidingWindowSpec(
            block_size=options.block_size, sliding_window=int(window), **shape
        ),
        # Without prefix caching a request has one state, whatever its length.
        "mamba": lambda: MambaSpec(block_size=options.max_model_len, shapes=((1,),), dtypes=(torch.float32,)),
    }[name]()
    return KVCacheGroupSpec([kind], spec)


def make_scheduler(scheduler_cls: type[Any], options: EngineOptions) -> Any:
    """A scheduler of that class with its own KV cache manager, as the engine core makes it."""
    vllm_config = make_vllm_config(options)
    register_all_kvcache_specs(vllm_config)
    groups = [_kv_group(kind, options) for kind in options.kv_groups]
    scheduler = scheduler_cls(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(options.num_blocks, [], groups),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=lcm(*(group.kv_cache_spec.block_size for group in groups)),
        hash_block_size=options.block_size,
        log_stats=True,
    )
    if options.encoder_tokens:
        # As the engine sets it up for a multimodal model, none of which is needed for its scheduling.
        scheduler.max_num_encoder_input_tokens = options.encoder_tokens
        scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=options.encoder_tokens)
    return scheduler


@StructuredOutputGrammar.register
class FakeGrammar:
    """A compiled grammar that accepts every token but one."""

    def __init__(self, rejected_token: int | None = None) -> None:
        self._rejected_token = rejected_token

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Whether all are accepted."""
        return self._rejected_token not in tokens

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """All are valid."""
        return tokens

    def is_terminated(self) -> bool:
        """It never is."""
        return False


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
        self._runner = FakeModelRunner(self.requests)
        self.decode_tokens = self._runner.decode_tokens
        self._tokens: dict[str, list[int]] = {}
        self._in_flight: deque[ComputedStep] = deque()
        self._transfers: dict[str, set[Any]] = {}
        self._sent: set[str] = set()
        init_none_hash(sha256)
        self._block_hasher = (
            get_request_block_hasher(self.options.block_size, sha256)
            if self.options.enable_prefix_caching
            else None
        )

    # --- what is seen ---------------------------------------------------------------------------------

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
    def num_in_flight(self) -> int:
        """Steps whose output the scheduler has not seen yet."""
        return len(self._in_flight)

    @property
    def running_ids(self) -> list[str]:
        """The requests that run."""
        return [request.request_id for request in self.scheduler.running]

    @property
    def loading_ids(self) -> list[str]:
        """The requests that wait for KV blocks from elsewhere, and those that were aborted meanwhile."""
        known = self._loads_known_to_have_ended()
        return [
            name
            for name, request in self.scheduler.requests.items()
            if name not in known and self._is_loading(request)
        ]

    @property
    def sending_ids(self) -> list[str]:
        """The ended requests whose blocks are kept until they are sent."""
        connector = self.scheduler.connector
        return [] if connector is None else sorted(connector.sending)

    # --- what happens ---------------------------------------------------------------------------------

    def submit(
        self,
        request_id: str,
        prompt_tokens: int | list[int],
        decode_tokens: int,
        *,
        max_tokens: int | None = None,
        priority: int = 0,
        options: RequestOptions | None = None,
        **sampling: Any,
    ) -> Request:
        """A request arrives that decodes ``decode_tokens`` tokens, the last of them a stop token.

        With a smaller ``max_tokens`` it ends there, by its length cap. Under the ID of a session it is
        the next turn of that.
        """
        request = self._request(
            request_id,
            prompt_tokens,
            priority,
            options or RequestOptions(),
            {"max_tokens": max_tokens or decode_tokens, "stop_token_ids": [STOP_TOKEN], **sampling},
        )
        self._runner.decode_tokens[request_id] = decode_tokens
        if request_id not in self.scheduler.requests:
            self.requests[request_id] = request
            self._tokens[request_id] = []
        self.scheduler.add_request(request)
        return request

    def end_session(self, request_id: str) -> None:
        """A session that waits for its next turn gets none."""
        self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """The client goes away; of a request that is unknown or over, nothing changes."""
        if request_id in self.requests and request_id not in self.outcomes:
            self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            self._answer(request_id, "abort", None)

    def compile_grammar(self, request_id: str, grammar: FakeGrammar | Exception | None = None) -> None:
        """The grammar that a request waits for is there, or is wrong."""
        compiled: Future[Any] = Future()
        if isinstance(grammar, Exception):
            compiled.set_exception(grammar)
        else:
            compiled.set_result(grammar or FakeGrammar())
        self.requests[request_id].structured_output_request.grammar = compiled

    def finish_load(self, request_id: str, *, failed: bool = False) -> None:
        """A load has ended; a ``failed`` one has brought no block, and is not tried again."""
        if failed and request_id in self.scheduler.requests:
            self.requests[request_id].kv_transfer_params = None
            manager = self.scheduler.kv_cache_manager
            (held,) = manager.get_block_ids(request_id)
            # Those that it shares were there before.
            loaded = [block for block in held if manager.block_pool.blocks[block].ref_cnt == 1]
            self._transfers.setdefault("invalid_block_ids", set()).update(loaded)
        self._transfers.setdefault("finished_recving", set()).add(request_id)

    def finish_send(self, request_id: str) -> None:
        """The blocks of an ended request are sent."""
        self.scheduler.connector.sending.remove(request_id)
        self._sent.add(request_id)
        self._transfers.setdefault("finished_sending", set()).add(request_id)

    def step(self, **hooks: Any) -> dict[str, int]:
        """One step of the engine; returns the tokens that it scheduled per request.

        ``hooks`` are what data parallelism passes to ``schedule``.
        """
        scheduled = self.scheduler.schedule(**hooks)
        self.steps.append(dict(scheduled.num_scheduled_tokens))
        transfers = KVConnectorOutput(**self._transfers) if self._transfers else None
        self._transfers = {}
        self._in_flight.append(self._runner.compute(scheduled, transfers))
        depth = self.options.batches_in_flight or (2 if self.options.async_scheduling else 1)
        if len(self._in_flight) >= depth or not scheduled.num_scheduled_tokens:
            self._take_in()
        return self.steps[-1]

    def run(self, *, max_idle_steps: int = MAX_IDLE_STEPS, max_steps: int = 100_000) -> None:
        """Step until every request has ended and every block that was to be sent is.

        Raises:
            NoProgressError: with the state, if that does not happen.
        """
        idle = 0
        for _ in range(max_steps):
            for name in self.loading_ids:
                self.finish_load(name)
            for name in self.sending_ids:
                self.finish_send(name)
            if not (self.scheduler.has_unfinished_requests() or self._transfers):
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

    def check_ledger(self) -> None:
        """Each unfinished request is in one place, the queues know how many wait, and no block is lost.

        Raises:
            AssertionError: with both sides.
        """
        scheduler = self.scheduler
        places = Counter(self.running_ids)
        for queue in self._waiting_queues():
            waiting = [request.request_id for request in queue]
            assert len(queue) == len(waiting), f"len is {len(queue)}, waiting are {waiting}"
            places.update(waiting)
        unfinished = [name for name, request in scheduler.requests.items() if not request.is_finished()]
        assert places == Counter(unfinished), f"in the engine {places}, unfinished {unfinished}"
        pool = scheduler.kv_cache_manager.block_pool
        held = sum(block.ref_cnt > 0 and not block.is_null for block in pool.blocks)
        free, usable = self.num_free_blocks, self.options.usable_blocks
        assert held + free == usable, f"{held} blocks are held and {free} free, of {usable}"

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

    # --- within -----------------------------------------------------------------------------------------

    def _waiting_queues(self) -> list[Any]:
        # Beside the queue there is another, for what is blocked or, in later versions, for what holds blocks.
        names = ("waiting", "skipped_waiting", "kv_holding_waiting")
        return [getattr(self.scheduler, name) for name in names if hasattr(self.scheduler, name)]

    def _is_loading(self, request: Request) -> bool:
        # The blocks of a request that is aborted while it loads are kept until the load has ended.
        return request.status == RequestStatus.WAITING_FOR_REMOTE_KVS or (
            request.is_finished()
            and request.request_id not in self._sent
            and request.request_id not in self.sending_ids
        )

    def _loads_known_to_have_ended(self) -> set[str]:
        reported = [step.output.kv_connector_output for step in self._in_flight]
        return {*self.scheduler.finished_recving_kv_req_ids}.union(
            self._transfers.get("finished_recving", ()),
            *(transfers.finished_recving or () for transfers in reported if transfers),
        )

    def _request(
        self,
        request_id: str,
        prompt_tokens: int | list[int],
        priority: int,
        options: RequestOptions,
        sampling: dict[str, Any],
    ) -> Request:
        if isinstance(prompt_tokens, int):
            first = 1000 + len(self.requests)
            prompt_tokens = [first] * prompt_tokens
        pooling = self.options.runner == "pooling"
        if options.kv_transfer is not None:
            sampling.setdefault("extra_args", {})["kv_transfer_params"] = options.kv_transfer
        if options.structured:
            sampling["structured_outputs"] = StructuredOutputsParams(json="{}")
        optional: dict[str, Any] = {"resumable": True} if options.session else {}
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt_tokens,
            sampling_params=None if pooling else SamplingParams(**sampling),
            pooling_params=PoolingParams() if pooling else None,
            priority=priority,
            arrival_time=float(len(self.requests)),
            block_hasher=self._block_hasher,
            lora_request=_adapter(options.adapter) if options.adapter else None,
            mm_features=[_encoder_input(request_id, *place) for place in options.encoder_inputs] or None,
            **optional,
        )

    def _take_in(self) -> None:
        step = self._in_flight.popleft()
        outputs = self.scheduler.update_from_output(step.scheduled, self._runner.hand_over(step))
        for of_client in outputs.values():
            for result in of_client.outputs:
                name = result.request_id
                self._tokens[name] += result.new_token_ids
                if result.finish_reason is not None and self._is_over(result, of_client.outputs):
                    self._answer(name, str(result.finish_reason), result.stop_reason)
        if self.options.speculative_tokens and not self.options.async_scheduling:
            drafts = self._runner.drafts(step, self.options.speculative_tokens)
            self.scheduler.update_draft_token_ids(drafts)

    def _is_over(self, result: Any, outputs: list[Any]) -> bool:
        """A session says how it ends at the end of each turn; the whole of it may end just after a turn."""
        request = self.requests[result.request_id]
        if not request.resumable:
            return bool(request.is_finished())
        *_, last = (output for output in outputs if output.request_id == request.request_id)
        return result is last and bool(request.is_finished())

    def _answer(self, name: str, finish_reason: str, stop_reason: int | str | None) -> None:
        assert name not in self.outcomes, f"{name} was answered twice"
        outcome = Outcome(tuple(self._tokens[name]), finish_reason, stop_reason)
        self.outcomes[name] = outcome
        self.answers.append((name, outcome))


def _adapter(number: int) -> LoRARequest:
    return LoRARequest(lora_name=f"adapter {number}", lora_int_id=number, lora_path="/nowhere")


def _encoder_input(request_id: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem.dummy(),
        modality="image",
        identifier=f"{request_id} at {offset}",
        mm_position=PlaceholderRange(offset=offset, length=length),
    )

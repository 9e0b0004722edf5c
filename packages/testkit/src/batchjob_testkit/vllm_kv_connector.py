"""A KV connector that loads and sends what each request says, and moves no data.

A request says it in ``SamplingParams(extra_args={"kv_transfer_params": {...}})``:

- ``tokens``: so many tokens of its prompt lie elsewhere and can be loaded; a single one is offered once
- ``is_async``: they are loaded while the request waits and holds blocks, not within its first step
- ``defers``: the connector cannot say yet, so often
- ``send``: the blocks are kept after the end of the request until they are sent
"""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.request import RequestStatus

_ENDED_BY_ITSELF: Final = frozenset({RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED})


class ScriptedConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """The scheduler's side of a KV connector; a worker's side is not needed without a model."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.sending: set[str] = set()
        """Ended requests whose blocks are kept until they are sent."""
        self._defers: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The tokens beyond ``num_computed_tokens`` that can be loaded, and whether while it waits."""
        script = request.kv_transfer_params or {}
        left = self._defers.setdefault(request.request_id, script.get("defers", 0))
        if left:
            self._defers[request.request_id] -= 1
            return None, False
        is_async = script.get("is_async", False)
        # A step computes at least one token; a load that ends before it may leave none.
        most = request.num_tokens - (not is_async)
        tokens = max(0, min(script.get("tokens", 0), most) - num_computed_tokens)
        return tokens, is_async and tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A load of the only token of a request is not offered again.

        Of what is loaded whole, vLLM computes the last token again. If that is all there is, none counts as
        computed, and vLLM asks once more, after each load.
        """
        if num_external_tokens == request.num_tokens == 1:
            request.kv_transfer_params = {**request.kv_transfer_params, "tokens": 0}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing to tell a worker."""
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks of a request that ended by itself are kept, to be sent."""
        script = request.kv_transfer_params or {}
        keeps = bool(script.get("send")) and request.status in _ENDED_BY_ITSELF
        if keeps:
            self.sending.add(request.request_id)
        return keeps, None

    # --- a worker's side ------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Not called without a model."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Not called without a model."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Not called without a model."""

    def wait_for_save(self) -> None:
        """Not called without a model."""

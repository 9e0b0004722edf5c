"""The entry point in ``vllm.general_plugins``: selects the scheduler that the configuration asks for.

vLLM calls :func:`register` once in each of its processes, before it makes its configuration.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from functools import wraps
from pkgutil import resolve_name
from typing import Any, Final

from batchjob_scheduler.compat import check_engine
from batchjob_scheduler.config import SECTION, ConfigError, requested

SYNC_CLASS: Final = "batchjob_scheduler.scheduler.BatchJobAwareScheduler"
ASYNC_CLASS: Final = "batchjob_scheduler.scheduler.BatchJobAwareAsyncScheduler"

_MARK: Final = "_batchjob_wrapped"

# vLLM configures the logger "vllm" and those below it.
logger = logging.getLogger("vllm.batchjob")


def register() -> None:
    """Let ``EngineArgs`` read our section; without one, everything stays as vLLM has it."""
    try:
        from vllm.engine.arg_utils import EngineArgs

        original = EngineArgs.create_engine_config
    except (ImportError, AttributeError) as error:
        # Whoever has not asked for us must not be stopped by us.
        logger.warning("%s is not read: %s", SECTION, error)
        return
    if hasattr(original, _MARK):
        return

    @wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        switched_on = requested(getattr(self, "additional_config", None)) is not None
        named = _name(getattr(self, "scheduler_cls", None)) in (SYNC_CLASS, ASYNC_CLASS)
        if switched_on or named:
            check_engine()
        if switched_on:
            _refuse_another_class(self.scheduler_cls, "--scheduler-cls")
        vllm_config = original(self, *args, **kwargs)
        if switched_on:
            _select(vllm_config.scheduler_config)
        if switched_on or named:
            _explain_refusals()
        return vllm_config

    setattr(create_engine_config, _MARK, True)
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign,unused-ignore]


def _select(scheduler_config: Any) -> None:
    chosen = scheduler_config.scheduler_cls
    if chosen is not None and not _has_the_same_purpose(chosen):
        _refuse_another_class(chosen, "the platform's scheduler")
        return
    scheduler_config.scheduler_cls = ASYNC_CLASS if scheduler_config.async_scheduling else SYNC_CLASS


def _refuse_another_class(chosen: object, source: str) -> None:
    if chosen is not None and not _is_ours(chosen):
        raise ConfigError(
            source,
            _name(chosen),
            f"none, or {SYNC_CLASS} or {ASYNC_CLASS}, while {SECTION}.enabled is true",
        )


def _name(chosen: object) -> str:
    if isinstance(chosen, type):
        return f"{chosen.__module__}.{chosen.__qualname__}"
    return str(chosen)


def _is_ours(chosen: object) -> bool:
    """Whether it is one of our classes or derives from one; one that cannot be imported is not."""
    if not isinstance(chosen, type):
        try:
            chosen = resolve_name(str(chosen))
        except (ImportError, AttributeError, ValueError):
            return False
    ancestors = chosen.__mro__ if isinstance(chosen, type) else ()
    return any(_name(ancestor) in (SYNC_CLASS, ASYNC_CLASS) for ancestor in ancestors)


def _has_the_same_purpose(chosen: object) -> bool:
    """vllm-ascend selects a scheduler of its own for the same section; ours takes its place."""
    module, _, name = _name(chosen).rpartition(".")
    ours = (SYNC_CLASS.rpartition(".")[2], ASYNC_CLASS.rpartition(".")[2])
    return name in ours and module.startswith("vllm_ascend.")


def _explain_refusals() -> None:
    """Let a request that can never fit end with its reason.

    The front end turns the engine's error into "Internal server error"; the numbers are in the
    stop reason, so they are raised from there before it looks.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    original = AsyncLLM.generate
    if hasattr(original, _MARK):
        return

    @wraps(original)
    async def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        async for output in original(self, *args, **kwargs):
            for completion in output.outputs:
                if completion.finish_reason == "error" and isinstance(completion.stop_reason, str):
                    raise ValueError(completion.stop_reason)
            yield output

    setattr(generate, _MARK, True)
    AsyncLLM.generate = generate  # type: ignore[method-assign,unused-ignore]

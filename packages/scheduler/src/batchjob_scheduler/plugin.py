"""The entry point in ``vllm.general_plugins``: selects the scheduler that the configuration asks for.

vLLM calls :func:`register` once in each of its processes, before it makes its configuration.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Mapping
from functools import wraps
from pkgutil import resolve_name
from typing import Any, Final

from batchjob_scheduler.compat import check_engine
from batchjob_scheduler.config import (
    PARENT,
    SECTION,
    BatchJobConfig,
    ConfigError,
    find_section,
    parse_section,
    requested,
    without_section,
)

PLUGIN: Final = "batchjob"
"""The name of the entry point."""

FILTER: Final = "VLLM_PLUGINS"
"""The variable with the names of all plug-ins that vLLM loads."""

SYNC_CLASS: Final = "batchjob_scheduler.scheduler.BatchJobAwareScheduler"
ASYNC_CLASS: Final = "batchjob_scheduler.scheduler.BatchJobAwareAsyncScheduler"

ASCEND_SCHEDULERS: Final = (
    "short_request_first_config",
    "profiling_chunk_config",
    "dyntra_lb_config",
    "recompute_scheduler_enable",
    "enable_balance_scheduling",
    "SLO_limits_for_dynamic_batch",
)
"""The switches of vllm-ascend's other schedulers, in ``additional_config`` or its ``scheduler_config``."""

_OURS: Final = (SYNC_CLASS, ASYNC_CLASS)
_BALANCE_VARIABLE: Final = "VLLM_ASCEND_BALANCE_SCHEDULING"
# What vllm-ascend takes for no: a switch may be a text, and -1 is no limit of its dynamic batch.
_OFF: Final = frozenset({"none", "false", "f", "no", "n", "off", "0", "-1"})

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
        given = getattr(self, "additional_config", None)
        settings = settings_asked_for(given, getattr(self, "scheduler_cls", None))
        if settings is not None:
            check_engine()
        self.additional_config = without_section(given)
        try:
            vllm_config = original(self, *args, **kwargs)
        finally:
            self.additional_config = given
        if settings is not None:
            _select(vllm_config.scheduler_config, settings)
            _explain_refusals()
        return vllm_config

    setattr(create_engine_config, _MARK, True)
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign,unused-ignore]


def settings_asked_for(additional_config: object, scheduler_cls: object) -> BatchJobConfig | None:
    """What our scheduler is to run with, or None if nothing asks for it.

    Raises:
        ConfigError: if the section is wrong, or another scheduler is asked for as well.
    """
    settings = requested(additional_config)
    if settings is not None:
        _refuse_another_class(scheduler_cls, "--scheduler-cls")
        _refuse_another_scheduler(additional_config)
        return settings
    _refuse_a_class_that_we_have_not(scheduler_cls)
    section = find_section(additional_config)
    if section is None:
        return BatchJobConfig() if _name(scheduler_cls) in _OURS else None
    return parse_section(section) if scheduler_cls is not None and is_ours(scheduler_cls) else None


def is_left_out() -> bool:
    """Whether the filter of vLLM's plug-ins leaves ours out."""
    return FILTER in os.environ and PLUGIN not in os.environ[FILTER].split(",")


def doubt_about_the_filter() -> str | None:
    """What is lost if the filter leaves the plug-in out and our class is named."""
    if not is_left_out():
        return None
    return (
        f"{FILTER}={os.environ[FILTER]!r} leaves {PLUGIN} out: the scheduler is on by its name, but a "
        "request that can never fit ends without its numbers, and no other scheduler beside it is refused"
    )


def doubt_about_the_class(name: str, *, is_made_for_async: bool, is_async: bool) -> str | None:
    """What is lost under a class that does not go with the engine's scheduling.

    Of our own two the plug-in takes the right one; a class that derives from one of them stays.
    """
    if is_made_for_async == is_async:
        return None
    on, right, loss = (
        ("on", ASYNC_CLASS, "each step waits for the one before")
        if is_async
        else ("off", SYNC_CLASS, "with several pipeline stages a step may lack its last token")
    )
    return (
        f"async scheduling is {on}, and {name} is not for that: {loss}; {right} is, and what derives from it"
    )


def _select(scheduler_config: Any, settings: BatchJobConfig) -> None:
    """Name our class and leave the settings in what goes to the engine's process.

    Not in ``additional_config``: vllm-ascend checks that again in each process.
    """
    chosen = scheduler_config.scheduler_cls
    _refuse_another_class(chosen, "the platform's scheduler")
    # Which of the two it must be is known only now, whichever the user has named.
    if chosen is None or _name(chosen) in _OURS:
        scheduler_config.scheduler_cls = ASYNC_CLASS if scheduler_config.async_scheduling else SYNC_CLASS
    setattr(scheduler_config, SECTION, settings)


def _refuse_another_class(chosen: object, source: str) -> None:
    if chosen is not None and not is_ours(chosen):
        raise ConfigError(
            source,
            _name(chosen),
            f"none, or {SYNC_CLASS} or {ASYNC_CLASS}, while {SECTION}.enabled is true",
        )


def _refuse_a_class_that_we_have_not(chosen: object) -> None:
    if _name(chosen).startswith(f"{__package__}.") and not is_ours(chosen):
        raise ConfigError("--scheduler-cls", _name(chosen), f"{SYNC_CLASS} or {ASYNC_CLASS}")


def _refuse_another_scheduler(additional_config: object) -> None:
    """Whatever changes vllm-ascend's scheduling, whether it selects a class or alters vLLM's own."""
    off = f"off, while {SECTION}.enabled is true"
    if os.environ.get(_BALANCE_VARIABLE, "0") != "0":
        raise ConfigError(_BALANCE_VARIABLE, os.environ[_BALANCE_VARIABLE], off)
    top = additional_config if isinstance(additional_config, Mapping) else {}
    nested = top.get(PARENT)
    for place in (top, nested if isinstance(nested, Mapping) else {}):
        for key in ASCEND_SCHEDULERS:
            if _is_switched_on(place.get(key)):
                raise ConfigError(key, place[key], off)


def _is_switched_on(value: object) -> bool:
    if isinstance(value, Mapping):
        value = value.get("enabled")
    return str(value).lower() not in _OFF


def _name(chosen: object) -> str:
    if isinstance(chosen, type):
        return f"{chosen.__module__}.{chosen.__qualname__}"
    return str(chosen)


def is_ours(chosen: object) -> bool:
    """Whether it is one of our classes or derives from one; one that cannot be imported is not."""
    if _name(chosen) in _OURS:
        return True
    if not isinstance(chosen, type):
        try:
            chosen = resolve_name(str(chosen))
        except (ImportError, AttributeError, ValueError):
            return False
    ancestors = chosen.__mro__ if isinstance(chosen, type) else ()
    return any(_name(ancestor) in _OURS for ancestor in ancestors)


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

"""Why the scheduler would not be on: what vLLM would find here, without starting it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points, packages_distributions, version
from typing import Final, NamedTuple

from batchjob_scheduler.compat import UnsupportedEngineError, check_engine
from batchjob_scheduler.config import SECTION, ConfigError
from batchjob_scheduler.plugin import (
    ASYNC_CLASS,
    FILTER,
    PLUGIN,
    SYNC_CLASS,
    doubt_about_the_filter,
    is_left_out,
    is_ours,
    settings_asked_for,
)

_GROUP: Final = "vllm.general_plugins"


class Finding(NamedTuple):
    """What was looked at, what was found, and whether the scheduler is kept from being on by it."""

    subject: str
    found: str
    is_problem: bool = False

    def __str__(self) -> str:
        return f"{'PROBLEM ' if self.is_problem else ''}{self.subject}: {self.found}"


def findings(additional_config: str | None, scheduler_cls: str | None) -> Iterator[Finding]:
    """Look at the installation, and at the engine's arguments if they are given."""
    by_name = scheduler_cls is not None and is_ours(scheduler_cls)
    plugins = sorted(plugin.name for plugin in entry_points(group=_GROUP))
    is_installed = PLUGIN in plugins
    yield _engine()
    yield Finding("vllm-ascend", _installed("vllm_ascend") or "not installed")
    found = f"{PLUGIN} is {'' if is_installed else 'not '}one of {', '.join(plugins) or 'none'} in {_GROUP}"
    yield Finding("plug-in", found, is_problem=not is_installed and not by_name)
    yield _filter(by_name=by_name)
    if additional_config is not None or scheduler_cls is not None:
        yield _scheduler(
            additional_config or "{}",
            SYNC_CLASS if by_name else scheduler_cls,
            is_loaded=is_installed and not is_left_out(),
        )


def is_healthy(found: Sequence[Finding]) -> bool:
    """Whether nothing that was found keeps the scheduler from being on."""
    return not any(finding.is_problem for finding in found)


def _installed(module: str) -> str | None:
    names = packages_distributions().get(module)
    return f"{names[0]} {version(names[0])}" if names else None


def _engine() -> Finding:
    engine = _installed("vllm")
    if engine is None:
        return Finding("vLLM", "not installed in this environment", is_problem=True)
    try:
        untested = check_engine()
    except UnsupportedEngineError as error:
        return Finding("vLLM", str(error), is_problem=True)
    except (ImportError, OSError, RuntimeError) as error:
        return Finding("vLLM", f"{engine} cannot be imported: {error}", is_problem=True)
    return Finding("vLLM", untested or engine)


def _filter(*, by_name: bool) -> Finding:
    allowed = os.environ.get(FILTER)
    if allowed is None:
        return Finding(FILTER, "not set, so that vLLM loads every plug-in")
    if not is_left_out():
        return Finding(FILTER, f"{allowed!r} names {PLUGIN}")
    if by_name:
        return Finding(FILTER, str(doubt_about_the_filter()))
    return Finding(
        FILTER,
        f"{allowed!r} leaves {PLUGIN} out, so that nothing of ours reads {SECTION}; "
        f"allowed: unset, or a list with {PLUGIN} in it, or --scheduler-cls {ASYNC_CLASS} "
        f"(without async scheduling {SYNC_CLASS})",
        is_problem=True,
    )


def _scheduler(additional_config: str, scheduler_cls: str | None, *, is_loaded: bool) -> Finding:
    try:
        given = json.loads(additional_config)
        settings = settings_asked_for(given, scheduler_cls)
    except json.JSONDecodeError as error:
        return Finding("--additional-config", f"is not JSON: {error}", is_problem=True)
    except ConfigError as error:
        return Finding("scheduler", str(error), is_problem=True)
    if settings is None:
        return Finding("scheduler", f"off, since {SECTION}.enabled is not true", is_problem=True)
    if not is_loaded and scheduler_cls is None:
        return Finding("scheduler", "off, since the plug-in is not loaded", is_problem=True)
    if not is_loaded and settings.enabled and _installed("vllm_ascend"):
        return Finding("scheduler", f"off, since vllm-ascend takes {SECTION} for its own", is_problem=True)
    return Finding("scheduler", f"on: {settings}")

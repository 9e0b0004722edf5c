"""Why the scheduler would not be on: what vLLM would find here, without starting it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points, packages_distributions, version
from typing import Final, NamedTuple

from batchjob_scheduler.config import SECTION, ConfigError
from batchjob_scheduler.plugin import SYNC_CLASS, settings_asked_for

_GROUP: Final = "vllm.general_plugins"
_PLUGIN: Final = "batchjob"


class Finding(NamedTuple):
    """What was looked at, what was found, and whether the scheduler is kept from being on by it."""

    subject: str
    found: str
    is_problem: bool = False

    def __str__(self) -> str:
        return f"{'PROBLEM ' if self.is_problem else ''}{self.subject}: {self.found}"


def findings(additional_config: str | None, scheduler_cls: str | None) -> Iterator[Finding]:
    """Look at the installation, and at the engine's arguments if they are given."""
    engine = _installed("vllm")
    yield Finding("vLLM", engine or "not installed in this environment", is_problem=engine is None)
    yield Finding("vllm-ascend", _installed("vllm_ascend") or "not installed")
    plugins = [plugin.name for plugin in entry_points(group=_GROUP)]
    found = f"one of {', '.join(sorted(plugins)) or 'none'} in {_GROUP}"
    yield Finding(
        "plug-in", f"{_PLUGIN} is {'' if _PLUGIN in plugins else 'not '}{found}", _PLUGIN not in plugins
    )
    yield _filter(os.environ.get("VLLM_PLUGINS"))
    if additional_config is not None or scheduler_cls is not None:
        yield _scheduler(additional_config or "{}", scheduler_cls)


def is_healthy(found: Sequence[Finding]) -> bool:
    """Whether nothing that was found keeps the scheduler from being on."""
    return not any(finding.is_problem for finding in found)


def _installed(module: str) -> str | None:
    names = packages_distributions().get(module)
    return f"{names[0]} {version(names[0])}" if names else None


def _filter(allowed: str | None) -> Finding:
    if allowed is None:
        return Finding("VLLM_PLUGINS", "not set, so that vLLM loads every plug-in")
    if _PLUGIN in allowed.split(","):
        return Finding("VLLM_PLUGINS", f"{allowed!r} names {_PLUGIN}")
    return Finding(
        "VLLM_PLUGINS",
        f"{allowed!r} leaves {_PLUGIN} out, so that vLLM ignores {SECTION}; "
        f"allowed: unset, or a list with {_PLUGIN} in it, or --scheduler-cls {SYNC_CLASS}",
        is_problem=True,
    )


def _scheduler(additional_config: str, scheduler_cls: str | None) -> Finding:
    try:
        settings = settings_asked_for(json.loads(additional_config), scheduler_cls)
    except json.JSONDecodeError as error:
        return Finding("--additional-config", f"is not JSON: {error}", is_problem=True)
    except ConfigError as error:
        return Finding("scheduler", str(error), is_problem=True)
    if settings is None:
        return Finding("scheduler", f"off, since {SECTION}.enabled is not true", is_problem=True)
    return Finding("scheduler", f"on: {settings}")

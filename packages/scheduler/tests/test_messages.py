"""Each message with which a start ends is on the page ``when-it-does-not-start.md``, word for word."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchjob_scheduler import config, plugin
from batchjob_scheduler.compat import UnsupportedEngineError, check_engine
from batchjob_scheduler.config import BatchJobConfig, ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "when-it-does-not-start.md"
HEADINGS = re.findall(r"^### `(.+)`$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
ON = {"batch_job_sched_config": {"enabled": True}}


def section(**settings):
    return {"batch_job_sched_config": {"enabled": True, **settings}}


MISTAKES = {
    "an unknown key": section(max_job=5),
    "no switch": {"batch_job_sched_config": {"enabled": "yes"}},
    "a negative count": section(max_jobs=-1),
    "no share": section(ewma_alpha=2),
    "no object": {"batch_job_sched_config": True},
    "both places": {**ON, "scheduler_config": ON},
    "a misspelt section": {"batch_job_scheduler_config": {"enabled": True}},
    "a misspelt parent": {"schedular_config": ON},
    "another scheduler": {**ON, "enable_balance_scheduling": True},
}


def provoked(monkeypatch):
    """What each mistake says."""
    said = {}
    for name, additional_config in MISTAKES.items():
        with pytest.raises(ConfigError) as raised:
            plugin.settings_asked_for(additional_config, None)
        said[name] = str(raised.value)
    with pytest.raises(ConfigError) as raised:
        plugin.settings_asked_for(ON, "some.where.OtherScheduler")
    said["another class"] = str(raised.value)
    with pytest.raises(ConfigError) as raised:
        plugin._select(SimpleNamespace(scheduler_cls="platform.Its"), BatchJobConfig())
    said["the platform's class"] = str(raised.value)
    monkeypatch.setenv("VLLM_ASCEND_BALANCE_SCHEDULING", "1")
    with pytest.raises(ConfigError) as raised:
        plugin.settings_asked_for(ON, None)
    said["a variable"] = str(raised.value)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.22.1"))
    with pytest.raises(UnsupportedEngineError) as unsupported:
        check_engine()
    said["an old vLLM"] = str(unsupported.value)
    return said


def heading_of(message):
    """The most specific heading that the message matches."""
    matching = [
        heading
        for heading in HEADINGS
        if re.fullmatch(".*".join(re.escape(part) for part in heading.split("…")), message)
    ]
    return max(matching, key=len, default=None)


def test_each_message_has_a_heading_and_each_heading_a_message(monkeypatch):
    said = provoked(monkeypatch)
    found = {name: heading_of(message) for name, message in said.items()}
    assert not [said[name] for name, heading in found.items() if heading is None]
    assert {*found.values()} == {*HEADINGS}


def test_no_message_of_the_code_is_forgotten(monkeypatch):
    """Each place that makes a message was reached by one of the mistakes."""
    reached = set()
    make = ConfigError.__init__

    def remember(self, *arguments):
        caller = sys._getframe(1)
        reached.add((Path(caller.f_code.co_filename).name, caller.f_lineno))
        make(self, *arguments)

    monkeypatch.setattr(ConfigError, "__init__", remember)
    provoked(monkeypatch)
    for module in (config, plugin):
        source = Path(module.__file__)
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "ConfigError":
                lines = range(node.lineno, node.end_lineno + 1)
                assert any((source.name, line) in reached for line in lines), f"{source.name}:{node.lineno}"

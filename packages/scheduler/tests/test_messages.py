"""Each message of ours is on the page ``when-it-does-not-start.md``, word for word.

Those with which a start ends have a heading there, those of the log stand in its tables; what ``batchjob
doctor`` says is held against them in ``test_doctor.py``.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchjob_scheduler import compat, config, plugin
from batchjob_scheduler.compat import UnsupportedEngineError, check_engine
from batchjob_scheduler.config import BatchJobConfig, ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "when-it-does-not-start.md"
HEADINGS = re.findall(r"^### `(.+)`$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
SOURCES = sorted(Path(plugin.__file__).parent.glob("*.py"))
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
CLASSES = {
    "another class": (ON, "some.where.OtherScheduler"),
    "no class": ({}, "batchjob_scheduler.Scheduler"),
}


def provoked(monkeypatch):
    """What each mistake says."""
    said = {}
    for name, additional_config in MISTAKES.items():
        with pytest.raises(ConfigError) as raised:
            plugin.settings_asked_for(additional_config, None)
        said[name] = str(raised.value)
    for name, arguments in CLASSES.items():
        with pytest.raises(ConfigError) as raised:
            plugin.settings_asked_for(*arguments)
        said[name] = str(raised.value)
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


def pattern_of(documented):
    """What a message must be like; ``…`` stands for what differs."""
    return ".*".join(re.escape(part) for part in documented.split("…"))


def heading_of(message):
    """The most specific heading that the message matches."""
    matching = [heading for heading in HEADINGS if re.fullmatch(pattern_of(heading), message)]
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


# --- the log ---------------------------------------------------------------------------------------------

ROWS = re.findall(r"^\|.*\|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
IN_TABLES = [quoted for row in ROWS for quoted in re.findall(r"`([^`]+ [^`]+)`", row)]


def is_in_a_table(message):
    return any(re.match(pattern_of(documented), message) for documented in IN_TABLES)


def stands_in_a_table(text):
    """The same for a text of which only the parts between what is filled in are known."""
    parts = [part.strip(" :=") for part in text.split("…")]
    return any(all(part in documented for part in parts) for documented in IN_TABLES)


def logged_texts():
    """What each call that warns says, with ``…`` for what is filled in; less what is made elsewhere."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"logger.warning", "logger.error"}:
                text = ast.literal_eval(node.args[0])
                if text != "%s":
                    yield text.replace("%s", "…")


def test_each_warning_is_in_a_table(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "ascend")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="99.0"))
    monkeypatch.setattr(compat, "NAMES", {})
    made_elsewhere = [
        compat.check_engine(),
        plugin.doubt_about_the_filter(),
        *(plugin.doubt_about_the_class("X", is_made_for_async=not on, is_async=on) for on in (True, False)),
    ]
    for message in made_elsewhere:
        assert is_in_a_table(message), message
    texts = [*logged_texts()]
    assert len(texts) == 4
    for text in texts:
        assert stands_in_a_table(text), text


def test_the_reason_of_a_request_that_never_fits_is_in_a_table():
    """The only text that the engine's process hands to a client."""
    (reason,) = [
        node.value
        for source in SOURCES
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "reason"
    ]
    text = "".join(part.value if isinstance(part, ast.Constant) else "…" for part in reason.values)
    assert stands_in_a_table(text), text

"""The list of vLLM's names is whole, and says what a vLLM lacks."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchjob_scheduler import compat, plugin

SOURCE = Path(__file__).parent.parent / "src" / "batchjob_scheduler"
NAMES = {where.partition(":")[2]: {*"|".join(names).split("|")} for where, names in compat.NAMES.items()}


def parsed(module):
    return ast.parse((SOURCE / f"{module}.py").read_text(encoding="utf-8"))


def read_from(tree, *variables):
    """The attributes of these variables, by the names that the variables have in the code."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in variables
    }


@pytest.mark.parametrize("module", sorted(path.stem for path in SOURCE.glob("*.py")))
def test_every_import_from_vllm_is_listed(module):
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            for alias in node.names:
                assert f"{node.module}:{alias.name}" in compat.NAMES


@pytest.mark.parametrize("module", ["queue", "running", "jobs", "scheduler"])
def test_every_attribute_of_a_request_is_listed(module):
    read = read_from(parsed(module), "request", "entry.request")
    assert read
    assert read <= NAMES["Request"]


def test_every_attribute_of_the_scheduler_is_listed():
    tree = parsed("scheduler")
    (ours,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "_BatchJobAware"]
    own = {node.name for node in ours.body if isinstance(node, ast.FunctionDef)} | {
        node.attr
        for node in ast.walk(ours)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr != "waiting"
    }
    read = read_from(ours, "self", "super()") | read_from(tree, "scheduler", "self._scheduler")
    assert read - own
    assert read - own <= NAMES["Scheduler"]


def engine_of(version, monkeypatch, **names):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    monkeypatch.setattr(compat, "NAMES", names)


class Engine:
    declared: int

    def __init__(self):
        self.assigned = 1

    def method(self):
        return self.read_only_here


HERE = f"{__name__}:Engine"


@pytest.mark.parametrize("name", ["declared", "assigned", "method", "gone|method"])
def test_an_attribute_is_found_wherever_a_class_tells_of_it(name):
    assert list(compat._missing(HERE, [name])) == []


def test_what_is_missing_is_named():
    assert list(compat._missing(HERE, ["read_only_here", "gone|too"])) == [
        "Engine.read_only_here",
        "Engine.gone or too",
    ]
    assert list(compat._missing("no.such.module:Class", ["name"])) == ["no.such.module.Class"]
    assert list(compat._missing(f"{__name__}:Gone", ["name"])) == [f"{__name__}.Gone"]


@pytest.mark.parametrize(
    ("version", "lack"), [("0.22.1", "which is too old"), ("0.40.0", "which lacks json.Gone")]
)
def test_an_unsupported_vllm_is_told_in_one_sentence(version, lack, monkeypatch):
    engine_of(version, monkeypatch, **{"json:Gone": ()})
    with pytest.raises(compat.UnsupportedEngineError) as raised:
        compat.check_engine()
    assert str(raised.value) == (
        f"batch_job_sched_config needs a vLLM of {compat.OLDEST} to {compat.NEWEST}, and this is vLLM "
        f"{version}, {lack}; with batch_job_sched_config.enabled: false, and without --scheduler-cls, "
        "vLLM's own scheduler starts"
    )


@pytest.mark.parametrize("version", ["0.23.0", "0.23.0+empty", "0.31.0", "0.33.0"])
def test_a_tested_vllm_needs_no_warning(version, monkeypatch):
    engine_of(version, monkeypatch)
    assert compat.check_engine() is None


@pytest.mark.parametrize("version", ["0.33.1", "1.0.0", "dev", "0.1.dev7+gabc"])
def test_one_that_was_not_tested_is_told(version, monkeypatch):
    engine_of(version, monkeypatch)
    assert version in compat.check_engine()


def test_the_plug_in_stops_nobody_where_it_cannot_read_the_section(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.1"))
    monkeypatch.setitem(sys.modules, "vllm.engine", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", SimpleNamespace())
    plugin.register()
    assert "batch_job_sched_config is not read" in caplog.text

"""The reference is made from the docstrings as they are, and its examples run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import sys
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
sys.path.insert(0, str(DOCS))
import generate_reference  # the script beside the documents
import pytest

RULES = ("jobs", "estimator", "blocks", "reservation", "ordering", "queue")


def test_the_reference_is_what_the_docstrings_say():
    written = generate_reference.TARGET.read_text(encoding="utf-8")
    assert written == generate_reference.reference(), "stale: run `nox -s reference`"


def test_the_examples_of_the_reference_run():
    result = doctest.testfile(str(generate_reference.TARGET), module_relative=False)
    assert result.failed == 0
    assert result.attempted > 40


@pytest.mark.parametrize("name", RULES)
def test_every_function_of_a_rule_has_an_example(name):
    module = importlib.import_module(f"batchjob_spec.{name}")
    functions = filter(inspect.isfunction, generate_reference.public_members(module))
    assert [
        function.__name__ for function in functions if ">>>" not in (inspect.getdoc(function) or "")
    ] == []

"""The reference is made from the docstrings as they are, and its examples run."""

from __future__ import annotations

import doctest
import sys
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
sys.path.insert(0, str(DOCS))
import generate_reference  # the script beside the documents


def test_the_reference_is_what_the_docstrings_say():
    written = generate_reference.TARGET.read_text(encoding="utf-8")
    assert written == generate_reference.reference(), "stale: run `nox -s reference`"


def test_the_examples_of_the_reference_run():
    result = doctest.testfile(str(generate_reference.TARGET), module_relative=False)
    assert result.failed == 0
    assert result.attempted > 40

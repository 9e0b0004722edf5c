"""The judge of CrossHair's report fails where CrossHair's exit status would not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import check_contracts  # the script beside this file

FUNCTIONS = {"blocks": [(10, "blocks_for*"), (20, "helper")]}
CONFIRMED = "/src/blocks.py:15: info: Confirmed over all paths."


def test_a_confirmed_condition_is_proved():
    verdict = check_contracts.judge([CONFIRMED], FUNCTIONS)
    assert (verdict.proved, verdict.failures) == (["blocks.blocks_for"], [])


@pytest.mark.parametrize(
    "line",
    [
        "/src/blocks.py:15: error: false when calling blocks_for(0, 1)",
        "/src/blocks.py:15: info: Unable to meet precondition.",
        "/src/blocks.py:15: info: Not confirmed.",
        "ModuleNotFoundError: No module named 'batchjob_spec.block'",
    ],
)
def test_anything_else_is_a_failure(line):
    assert check_contracts.judge([CONFIRMED, line], FUNCTIONS).failures


def test_a_contract_that_was_not_checked_is_a_failure():
    verdict = check_contracts.judge([], FUNCTIONS)
    assert verdict.failures == ["blocks.blocks_for: nothing was checked"]


def test_every_module_with_scalar_rules_has_contracts():
    functions = check_contracts.functions_of(check_contracts.MODULES)
    for module in check_contracts.MODULES:
        assert any(name.endswith("*") for _, name in functions[module]), module

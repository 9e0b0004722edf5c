"""The documents agree with the code."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from batchjob_scheduler import compat
from batchjob_scheduler.config import BatchJobConfig

ROOT = Path(__file__).parent.parent
PROPERTIES = (ROOT / "docs" / "properties.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
SUITES = "packages/testkit/src/batchjob_testkit"
SHORT_NAMES = {name: f"{SUITES}/{name}" for name in ("contracts.py", "kv_contracts.py", "kv_ledger.py")}

RULES = (
    *(f"J{n}" for n in range(1, 5)),
    *(f"E{n}" for n in range(1, 6)),
    *(f"V{n}" for n in range(1, 6)),
    *(f"O{n}" for n in range(7)),
    *(f"Q{n}" for n in range(1, 8)),
    *(f"P{n}" for n in range(1, 5)),
    *(f"K{n}" for n in range(1, 9)),
)
ROWS = {
    cells[1].strip(): cells
    for line in PROPERTIES.splitlines()
    if line.startswith("| ") and len(cells := line.split("|")) > 5 and cells[1].strip() in RULES
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_a_row_with_what_checks_it(rule):
    checked = ROWS[rule][4]
    assert any(
        word in checked
        for word in ("proved", "searched", "exhaustive", "tested", "simulated", "not measured")
    )


@pytest.mark.parametrize("rule", RULES)
def test_the_predicates_of_a_rule_exist(rule):
    for module, name in re.findall(r"`(\w+)\.(\w+)`", ROWS[rule][3]):
        assert callable(getattr(importlib.import_module(f"batchjob_spec.{module}"), name))


@pytest.mark.parametrize("rule", RULES)
def test_the_files_that_check_a_rule_exist_and_name_it(rule):
    for name in re.findall(r"`([\w/.]+\.py)`", ROWS[rule][5]):
        assert (ROOT / SHORT_NAMES.get(name, name)).is_file()


def test_everything_that_the_list_of_rules_names_exists():
    for name in re.findall(r"`([\w/.]+\.(?:py|toml))`", PROPERTIES):
        assert (ROOT / SHORT_NAMES.get(name, name)).is_file(), name
    tests = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("packages/*/tests/**/test_*.py"))
    for name in re.findall(r"`(test_\w+)`", PROPERTIES):
        assert f"def {name}(" in tests, name


def test_what_is_left_open_is_said_of_rules_that_exist():
    (table,) = re.findall(r"^\| rule \| open \|\n\|---\|---\|\n((?:\|.*\n)+)", PROPERTIES, re.MULTILINE)
    named = [rule for line in table.splitlines() for rule in re.findall(r"\b[A-Z]\d\b", line.split("|")[1])]
    assert len(named) == len(set(named))
    assert set(named) <= set(RULES)


def test_the_configuration_table_is_the_code():
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| `([\w.]+)` \|", README, flags=re.MULTILINE)
    documented = {
        key: (kind, default if kind == "str" else json.loads(default)) for key, kind, default in rows
    }
    fields = BatchJobConfig.model_fields
    assert documented == {key: (type(field.default).__name__, field.default) for key, field in fields.items()}


DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/*.md")]


@pytest.mark.parametrize("source", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(source):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", source.read_text(encoding="utf-8")):
        assert (source.parent / target).exists(), target


def test_every_session_of_the_contributing_table_exists():
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([\w-]+)` \|", contributing, flags=re.MULTILINE))
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    defined = re.findall(r"@nox\.session(?:\((?:name=\"([\w-]+)\")?[^)]*\))?\ndef (\w+)", noxfile)
    assert named == {name or function for name, function in defined}


def test_the_matrix_of_versions_has_supported_ones_that_pass():
    tomllib = pytest.importorskip("tomllib")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    supported = [requirement.partition("==")[2] for requirement in groups["vllm-versions"]]
    assert (supported[0], supported[-1]) == (compat.OLDEST, compat.NEWEST)
    rows = re.findall(r"^\| (\d[\d.]+) \| (.+) \| (.+) \|$", README, flags=re.MULTILINE)
    ran = [version for version, *_ in rows]
    assert ran == [version for version in supported if version in ran] != []
    assert {word for _, *words in rows for word in words} <= {"passes", "not run"}


DEFINED_TESTS = {
    name
    for source in (*ROOT.glob("packages/*/tests/**/*.py"), *ROOT.glob("packages/*/src/**/*contracts.py"))
    for name in re.findall(r"def (test_\w+)", source.read_text(encoding="utf-8"))
}


@pytest.mark.parametrize("page", ["faults-elsewhere", "vllm-ascend-demands"])
def test_every_test_that_a_page_names_exists(page):
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    assert named
    assert named <= DEFINED_TESTS

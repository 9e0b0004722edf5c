"""Who may import whom. The folder of a module says what it may depend on."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent.parent / "packages"

STANDARD_LIBRARY = frozenset(sys.stdlib_module_names)
OURS = {"batchjob_spec", "batchjob_scheduler", "batchjob_testkit"}
ENGINE = {"vllm", "torch", "transformers", "tokenizers"}

ALLOWED = {
    "batchjob_spec": {"batchjob_spec"},
    "batchjob_scheduler": {"batchjob_scheduler", "pydantic", "sortedcontainers", "tabulate"},
    "batchjob_testkit": {"batchjob_testkit", "batchjob_spec", "pytest", "hypothesis"},
}
# Only these modules may import the engine: the testkit's are named for what they need.
WITH_ENGINE = {
    "batchjob_spec": set(),
    "batchjob_scheduler": {"scheduler", "plugin"},
    "batchjob_testkit": {
        "tiny_model",
        "vllm_backend",
        "vllm_histories",
        "vllm_kv_cache",
        "vllm_kv_connector",
        "vllm_model_runner",
        "vllm_scheduler",
        "vllm_step_log",
    },
}


def modules():
    """Each module as (package, file)."""
    return [
        pytest.param(source.relative_to(PACKAGES).parts[2], source, id=source.stem)
        for source in sorted(PACKAGES.glob("*/src/*/**/*.py"))
    ]


def imported(source: Path) -> set[str]:
    """The top-level packages that a file imports, at its top or within a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize(("package", "source"), modules())
def test_a_module_imports_only_what_its_package_may(package, source):
    allowed = ALLOWED[package] | STANDARD_LIBRARY
    if source.stem in WITH_ENGINE[package]:
        allowed = allowed | ENGINE
    if source.stem == "plots":
        allowed = allowed | {"matplotlib"}
    assert imported(source) <= allowed


def test_every_package_was_looked_at():
    assert {parameter.values[0] for parameter in modules()} == OURS


def test_declared_dependencies_are_those_allowed():
    tomllib = pytest.importorskip("tomllib")
    for package, allowed in ALLOWED.items():
        folder = PACKAGES / package.removeprefix("batchjob_")
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        declared = {
            requirement.split(">")[0].split("=")[0].replace("-", "_")
            for requirement in project.get("dependencies", [])
        }
        assert declared == allowed - {package}

"""The pytest plug-in: markers, an option and a header. It imports nothing heavy before it is needed.

- ``--batchjob-seed N``: Hypothesis searches from seed N in the contract suites, so that a run can be
  had again. Other tests keep their own seed.
- ``BATCHJOB_PROFILE=NAME``: the Hypothesis profile, unless ``--hypothesis-profile`` names one.
  ``default`` and ``ci`` (derandomised) are Hypothesis's own; ``nightly``, which searches ten times as
  long, is registered here unless the project has one of its own.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

import pytest

MARKERS = (
    "vllm: needs vLLM, and drives its scheduler without a model",
    "engine: needs vLLM, and runs a model",
    "ascend: needs vllm-ascend, and stands in for the NPU",
    "npu: needs an Ascend NPU",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--batchjob-seed``."""
    group = parser.getgroup("batchjob")
    group.addoption(
        "--batchjob-seed", type=int, metavar="N", help="let the contract suites search from seed N"
    )


@pytest.hookimpl(tryfirst=True)  # before Hypothesis loads the profile that its option names
def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and the profiles where one is asked for."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    named = config.getoption("hypothesis_profile", default=None)
    chosen = named or os.environ.get("BATCHJOB_PROFILE")
    if chosen:
        _register_profiles()
        if not named:
            _load_profile(chosen)


def pytest_report_header(config: pytest.Config) -> str:
    """The rules that are tested, and how the search is seeded."""
    seed = config.getoption("batchjob_seed")
    return f"batchjob: rules of batchjob-spec {_version('batchjob-spec')}" + (
        "" if seed is None else f", seed {seed}"
    )


def pytest_report_collectionfinish(items: list[pytest.Item]) -> list[str]:
    """The classes under test, each with its contract."""
    classes = dict.fromkeys(item.cls for item in items if isinstance(item, pytest.Function) and item.cls)
    contracts = {cls: contract for cls in classes if (contract := _contract_of(cls))}
    return [f"batchjob: {cls.__module__}.{cls.__name__} ({name})" for cls, name in contracts.items()]


def _contract_of(cls: type) -> str | None:
    suites = (base for base in cls.__mro__[1:] if base.__module__.startswith("batchjob_testkit."))
    return next((suite.__name__ for suite in suites if suite.__name__.endswith("Contract")), None)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"


def _register_profiles() -> None:
    from hypothesis import settings
    from hypothesis.errors import InvalidArgument

    try:
        settings.get_profile("nightly")
    except InvalidArgument:
        settings.register_profile("nightly", max_examples=1000, deadline=None, print_blob=True)


def _load_profile(name: str) -> None:
    from hypothesis import settings
    from hypothesis.errors import InvalidArgument

    try:
        settings.load_profile(name)
    except InvalidArgument as error:
        raise pytest.UsageError(
            f"BATCHJOB_PROFILE: got {name!r}, allowed: default, ci, nightly or one of your own"
        ) from error

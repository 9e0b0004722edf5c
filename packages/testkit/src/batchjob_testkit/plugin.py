"""The pytest plug-in: registers the markers that our suites use, and imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

MARKERS = (
    "vllm: needs vLLM, and drives its scheduler without a model",
    "engine: needs vLLM, and runs a model",
    "npu: needs an Ascend NPU",
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)

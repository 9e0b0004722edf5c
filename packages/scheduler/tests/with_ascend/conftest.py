"""vllm-ascend's own Python code on a machine without an NPU.

What the NPU's runtime would provide answers anything with a dummy: nothing here computes. It must be in
place before vLLM looks for its platform, so it is set up when this file is loaded.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed
import transformers

# Parts of the NPU's runtime; and torchvision, which some releases import for their image models, but whose
# published builds break beside a torch for CPU.
NOT_ON_THIS_MACHINE = {"torch_npu", "acl", "mooncake", "fla_npu", "torchvision"}


class DummyModule(ModuleType):
    """A package in which every name exists."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        dummy = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, dummy)
        return dummy


class DummyImporter(MetaPathFinder, Loader):
    """Finds the absent packages, and whatever is said to be in them."""

    def find_spec(self, fullname, *_):
        if fullname.partition(".")[0] in NOT_ON_THIS_MACHINE:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return DummyModule(spec.name)

    def exec_module(self, module):
        pass


# It goes without torchvision, and remembers whether there was one when it first looked.
transformers.utils.is_torchvision_available()
sys.meta_path.append(DummyImporter())
torch.npu = MagicMock(name="torch.npu")
torch.distributed.is_hccl_available = lambda: False
torch.utils.rename_privateuse1_backend("npu")


@pytest.fixture(scope="session", autouse=True)
def model_classes_are_inspected_here():
    """vLLM inspects them in a process of its own, which has no dummies."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()

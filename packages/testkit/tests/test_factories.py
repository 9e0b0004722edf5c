"""A contract class or a state machine with a wrong factory says which class and which, in one line."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from batchjob_testkit.contracts import (
    EstimatorContract,
    QueueContract,
    RequestQueueContract,
    ReservationContract,
)
from batchjob_testkit.engines import EngineCore
from batchjob_testkit.factories import checked
from batchjob_testkit.kv_contracts import KVHistories, KVManagerContract
from batchjob_testkit.queues import RequestQueue, WaitingQueue
from batchjob_testkit.scheduler_contracts import SchedulerContract
from batchjob_testkit.stateful import QueueLockstep

pytest_plugins = ["pytester"]

SUITE = """
import pytest
from {contract.__module__} import {contract.__name__}

class TestMine({contract.__name__}):
    {body}
"""
FIXTURES = {
    QueueContract: "make_queue",
    RequestQueueContract: "make_queue",
    EstimatorContract: "make_estimator",
    ReservationContract: "make_reservation",
    KVManagerContract: "make_manager",
    SchedulerContract: "make_engine",
}
MACHINES = {QueueLockstep: "make_queue", KVHistories: "make_manager"}
FIXTURE = "@pytest.fixture\n    def {name}(self): return {value}"


@pytest.fixture
def one_example(monkeypatch):
    """Searches end with their first example: a wrong factory fails with each."""
    for name in ("BATCHJOB_PROFILE", "BATCHJOB_LOCKSTEP_EXAMPLES"):
        monkeypatch.delenv(name, raising=False)
    profile = settings.get_current_profile_name()
    settings.register_profile("one example", max_examples=1, phases=[Phase.generate], database=None)
    settings.load_profile("one example")
    yield
    settings.load_profile(profile)


@pytest.fixture
def errors(pytester, one_example):
    """The first line of how each test of a contract class with this body ends."""

    def run(contract, body):
        pytester.makepyfile(SUITE.format(contract=contract, body=body))
        reports = pytester.inline_run("-p", "no:cacheprovider", "--tb=short").getreports(
            "pytest_runtest_logreport"
        )
        assert not any(report.passed and report.when == "call" for report in reports)
        return [report.longrepr.reprcrash.message.splitlines()[0] for report in reports if report.failed]

    return run


@pytest.mark.parametrize("contract", FIXTURES, ids=lambda contract: contract.__name__)
def test_a_missing_factory_is_named(errors, contract):
    lines = errors(contract, "pass")
    assert lines
    for line in lines:
        assert f"TestMine.{FIXTURES[contract]} must be overridden and return a function of" in line


@pytest.mark.parametrize("contract", FIXTURES, ids=lambda contract: contract.__name__)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("None", "returned None, allowed: a function that makes what is tested"),
        ("lambda *_: None", "made None, allowed: a"),
        ("lambda *_: [].missing", "returned a function that raised AttributeError("),
    ],
)
def test_a_wrong_factory_is_named(errors, contract, value, message):
    fixture = FIXTURES[contract]
    lines = errors(contract, FIXTURE.format(name=fixture, value=value))
    assert lines
    for line in lines:
        assert f"TestMine.{fixture} {message}" in line


def broken_factory(*_):
    raise KeyError("max_jobs")


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        (None, NotImplementedError, "must be overridden and return a function of"),
        (5, TypeError, "returned 5, allowed: a function that makes what is tested"),
        (lambda *_: None, TypeError, "made None, allowed: a"),
        (broken_factory, RuntimeError, "returned a function that raised KeyError"),
    ],
    ids=["missing", "no function", "makes nothing", "raises"],
)
def test_a_state_machine_names_its_wrong_factory(machine, factory, error, message):
    name = MACHINES[machine]
    mine = type("Mine", (machine,), {name: staticmethod(factory) if callable(factory) else factory})
    with pytest.raises(error, match=rf"^Mine\.{name} {message}") as raised:
        run_state_machine_as_test(mine, settings=settings(max_examples=1, database=None))
    assert len(str(raised.value).splitlines()) == 1


def test_an_engine_without_an_attribute_is_refused():
    class AlmostAnEngine:
        num_free_blocks = running_ids = 0
        submit = abort = step = print

    with pytest.raises(TypeError, match=r"allowed: an EngineCore, which has answers$"):
        checked(AlmostAnEngine, "TestMine.make_engine", EngineCore)()


def test_only_the_missing_methods_are_listed():
    class AlmostAQueue(list):
        add_request = prepend_request = prepend_requests = pop_request = list.append
        remove_request = remove_requests = list.append

    for shape, missing in ((RequestQueue, ["peek_request"]), (WaitingQueue, ["end", "peek_request"])):
        with pytest.raises(
            TypeError, match=r"TestMine\.make_queue made \[\], allowed: .* which has "
        ) as error:
            checked(AlmostAQueue, "TestMine.make_queue", shape)()
        named = str(error.value).rpartition("which has ")[2].split(", ")
        assert {*missing, "__bool__"} <= {*named}
        assert "pop_request" not in named

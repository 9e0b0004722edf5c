"""The factories that a contract asks for, checked before the contract uses what they make."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def must_be_overridden(suite: type, name: str, what: str) -> NotImplementedError:
    """The error of a contract class or a state machine that has no factory."""
    return NotImplementedError(f"{suite.__name__}.{name} must be overridden and return a function of {what}")


def checked(factory: Any, fixture: str, shape: type) -> Callable[..., Any]:
    """The factory that a fixture returned; whatever is wrong with it is said in one line.

    ``fixture`` names class and fixture, ``shape`` is the protocol of what the factory makes.

    Raises:
        TypeError: if it is no function, or what it makes lacks a method.
        RuntimeError: if it raises.

    >>> from batchjob_testkit.estimators import Estimator
    >>> checked(lambda alpha: 5, "TestMine.make_estimator", Estimator)(0.1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    TypeError: TestMine.make_estimator made 5, allowed: an Estimator, which has observe, predicted_tokens, ...
    """
    if isinstance(factory, CheckedFactory):
        return factory
    if not callable(factory):
        raise TypeError(f"{fixture} returned {factory!r}, allowed: a function that makes what is tested")
    return CheckedFactory(factory, fixture, shape)


def checked_of(machine: type, name: str, shape: type, what: str) -> Callable[..., Any]:
    """The factory that a state machine has as an attribute, checked in the same way."""
    factory = getattr(machine, name, None)
    if factory is None:
        raise must_be_overridden(machine, name, what)
    return checked(factory, f"{machine.__name__}.{name}", shape)


@dataclass(frozen=True)
class CheckedFactory:
    """A factory that says in one line what is wrong with it; made by :func:`checked`."""

    factory: Callable[..., Any]
    fixture: str
    shape: type

    def __call__(self, *arguments: Any) -> Any:
        """What the factory makes."""
        try:
            made = self.factory(*arguments)
        except Exception as error:
            raise RuntimeError(f"{self.fixture} returned a function that raised {error!r}") from error
        missing = missing_members(made, self.shape)
        if missing:
            article = "an" if self.shape.__name__[0] in "AEIOU" else "a"
            allowed = f"{article} {self.shape.__name__}, which has {', '.join(missing)}"
            raise TypeError(f"{self.fixture} made {made!r}, allowed: {allowed}")
        return made


def missing_members(made: Any, shape: type) -> list[str]:
    """The attributes and methods that a protocol asks for and ``made`` lacks, in alphabetical order."""
    written_by_python = {"__init__", "__subclasshook__"}
    missing = set()
    for protocol in (base for base in shape.__mro__ if getattr(base, "_is_protocol", False)):
        members = vars(protocol).items()
        methods = {name for name, member in members if inspect.isfunction(member)} - written_by_python
        attributes = {name for name, member in members if isinstance(member, property)}
        missing |= {name for name in methods if not callable(getattr(made, name, None))}
        missing |= {
            name for name in attributes | {*inspect.get_annotations(protocol)} if not hasattr(made, name)
        }
    return sorted(missing)

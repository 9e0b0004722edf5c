"""The factories that a contract asks for, checked before the contract uses what they make."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


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
    if not callable(factory):
        raise TypeError(f"{fixture} returned {factory!r}, allowed: a function that makes what is tested")
    methods = methods_of(shape)

    def make(*arguments: Any) -> Any:
        try:
            made = factory(*arguments)
        except Exception as error:
            raise RuntimeError(f"{fixture} returned a function that raised {error!r}") from error
        missing = [name for name in methods if not callable(getattr(made, name, None))]
        if missing:
            article = "an" if shape.__name__[0] in "AEIOU" else "a"
            allowed = f"{article} {shape.__name__}, which has {', '.join(missing)}"
            raise TypeError(f"{fixture} made {made!r}, allowed: {allowed}")
        return made

    return make


def methods_of(shape: type) -> list[str]:
    """The methods that a protocol asks for, in alphabetical order."""
    written_by_python = {"__init__", "__subclasshook__"}
    return sorted(
        name
        for base in shape.__mro__
        if getattr(base, "_is_protocol", False)
        for name, member in vars(base).items()
        if inspect.isfunction(member) and name not in written_by_python
    )

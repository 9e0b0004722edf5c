"""Write ``docs/reference/spec.md`` from the docstrings of the specification.

Examples become indented blocks, which both Markdown and doctest understand; contracts become a list.
``packages/spec/tests/test_reference.py`` fails when the written file is not what this makes.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES = ("jobs", "estimator", "blocks", "reservation", "ordering", "queue", "model", "invariants", "errors")
TARGET = Path(__file__).parent / "reference" / "spec.md"

HEAD = """# The specification

Made from the docstrings of `batchjob_spec` by `nox -s reference`; its examples are run as tests. A function
starts with the number of its rule, as in [the list of rules](../properties.md), which says how each one is
checked. *Requires* and *ensures* are its contract: what it may be called with, and what then holds of
`result`, what it returns.
"""


def reference() -> str:
    """The whole document."""
    return "\n".join([HEAD, *(line for name in MODULES for line in section(name))])


def section(name: str) -> Iterator[str]:
    """A module: what it says of itself, then its public classes and functions in their order."""
    module = importlib.import_module(f"batchjob_spec.{name}")
    yield f"## `{name}`\n"
    yield from body(inspect.getdoc(module) or "", imports=f"    >>> from batchjob_spec.{name} import *\n")
    for member in public_members(module):
        name = member.__name__
        yield f"### `{name}`\n"
        if inspect.isfunction(member) or is_dataclass(member):
            yield f"    {name}{signature(member)}\n"
        yield from body(inspect.getdoc(member) or "")


def signature(member: Any) -> str:
    """What a function takes and returns, or a class is made from, with the names as one reads them."""
    text = str(inspect.signature(member)).replace("'", "").replace("<factory>", "...")
    return text.removesuffix(" -> None").replace("batchjob_spec.", "")


def public_members(module: ModuleType) -> list[Any]:
    """What a module defines under a name without an underscore, in the order of its lines."""
    members = [
        member
        for name, member in vars(module).items()
        if (inspect.isclass(member) or inspect.isfunction(member))
        and member.__module__ == module.__name__
        and not name.startswith("_")
    ]
    return sorted(members, key=lambda member: inspect.getsourcelines(member)[1])


def body(docstring: str, imports: str = "") -> Iterator[str]:
    """A docstring as Markdown: its prose, its examples and its contract."""
    contract: list[str] = []
    for position, paragraph in enumerate(re.split(r"\n\s*\n", docstring)):
        if re.match(r"(pre|post):", paragraph):
            contract += [contract_line(line) for line in paragraph.splitlines()]
        elif paragraph.startswith(">>>"):
            yield "\n".join(f"    {line}" for line in paragraph.splitlines()) + "\n"
        else:
            yield as_markdown(paragraph) + "\n"
        if position == 0 and imports:
            yield imports
    if contract:
        yield "\n".join(contract) + "\n"


def contract_line(line: str) -> str:
    """``pre: tokens >= 0`` as a list item."""
    kind, condition = line.strip().split(": ", 1)
    word = {"pre": "Requires", "post": "Ensures"}[kind]
    return f"- *{word}* `{condition.replace('__return__', 'result')}`"


def as_markdown(paragraph: str) -> str:
    """Double backticks and references to functions as Markdown's code."""
    paragraph = re.sub(r":\w+:`([^`]+)`", r"`\1`", paragraph)
    return paragraph.replace("``", "`")


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(reference(), encoding="utf-8")
    print(f"wrote {TARGET}")

"""What a tutorial or a how-to tells its reader to write and to run does what it says.

The files of its Python blocks are written to an empty folder, in turn, and its calls of pytest are run there.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
WALKTHROUGHS = (
    "tutorials/your-first-contract-test.md",
    "how-to/test-your-own-scheduler.md",
    "how-to/replay-a-failing-seed.md",
)
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLUGIN = ("-p", "no:batchjob_testkit", "-p", "batchjob_testkit.plugin", "-p", "no:cacheprovider")


@pytest.mark.parametrize("document", WALKTHROUGHS)
def test_a_reader_who_follows_it_sees_what_it_says(tmp_path, document):
    runs = 0
    for kind, text in BLOCK.findall((DOCS / document).read_text(encoding="utf-8")):
        if kind == "python":
            write(tmp_path, text)
        elif "pytest" in text:
            runs += 1
            command, _, expected = text.removeprefix("$ ").partition("\n")
            says_in_order(run(tmp_path, command), expected)
    assert runs >= 2


def write(folder: Path, text: str) -> None:
    """``# FILE`` at its head says where a block belongs, ``# FILE: NAME`` that it replaces a function."""
    file, name = re.match(r"# (\w+\.py)(?:: (\w+))?\n", text).groups()
    if name:
        old = re.compile(rf"^( *)def {name}\(.*?(?=^\1\S|\Z)", re.MULTILINE | re.DOTALL)
        new = text.partition("\n")[2] + "\n"
        text, replaced = old.subn(lambda _: new, (folder / file).read_text(encoding="utf-8"))
        assert replaced == 1
    (folder / file).write_text(text, encoding="utf-8")


def run(folder: Path, command: str) -> str:
    """What ``NAME=VALUE pytest ARGUMENTS`` prints, with the testkit that is under test."""
    words = shlex.split(command)
    at = words.index("pytest")
    chosen = dict(word.split("=", 1) for word in words[:at])
    path = os.pathsep.join(filter(None, sys.path))
    ours = {name: value for name, value in os.environ.items() if not name.startswith("BATCHJOB_")}
    return subprocess.run(
        [sys.executable, "-B", "-m", "pytest", *PLUGIN, *words[at + 1 :]],
        cwd=folder,
        env={**ours, "PYTHONPATH": path, "PYTEST_ADDOPTS": "", "CI": "", **chosen},
        capture_output=True,
        text=True,
        check=False,
    ).stdout


def says_in_order(output: str, expected: str) -> None:
    """Every line of ``expected`` is in the output, in this order; ``...`` stands for whatever is between."""
    printed = " ".join(output.split())
    for wanted in filter(None, (" ".join(part.split()) for part in re.split(r"\.\.\.|\n", expected))):
        _, found, printed = printed.partition(wanted)
        assert found, f"{wanted!r} is not in what is left of\n{output}"

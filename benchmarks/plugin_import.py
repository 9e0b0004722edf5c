"""What the testkit's pytest plug-in adds to the start of pytest: run it where the testkit is installed.

Prints the wall time of ``pytest --version`` with the plug-in and without it, over alternating runs,
and of ``pytest --version --version``, which loads all plug-ins whatever the version of pytest.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 15
BLOCKED = ("-p", "no:batchjob_testkit")
COMMANDS = {
    "with the plug-in": (
        *BLOCKED,
        "-p",
        "batchjob_testkit.plugin",
    ),  # loaded whether installed or on the path
    "without it": BLOCKED,
}


def milliseconds(*arguments: str) -> float:
    """The wall time of one start of pytest."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "pytest", *arguments]
    subprocess.run(command, check=True, capture_output=True)
    return (time.perf_counter() - start) * 1000


def main() -> None:
    """Measure and print."""
    for version in (["--version"], ["--version", "--version"]):
        times: dict[str, list[float]] = {name: [] for name in COMMANDS}
        for _ in range(RUNS):
            for name, arguments in COMMANDS.items():
                times[name].append(milliseconds(*version, *arguments))
        for name, taken in times.items():
            least, middle, most = min(taken), statistics.median(taken), max(taken)
            print(
                f"pytest {' '.join(version)} {name}: "
                f"min {least:.0f}, median {middle:.0f}, max {most:.0f} ms ({RUNS} runs)"
            )
        added = [statistics.median(times[name]) for name in COMMANDS]
        print(f"pytest {' '.join(version)}: the plug-in adds {added[0] - added[1]:.0f} ms (medians)")


if __name__ == "__main__":
    main()

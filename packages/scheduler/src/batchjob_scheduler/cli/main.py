"""The arguments of the command ``batchjob``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from batchjob_scheduler.cli.tables import answers_table, jobs_table
from batchjob_scheduler.report import Report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.output is not None:
            print(answers_table(options.output))
        if options.jobs is not None:
            print()
            print(jobs_table(Report.read(options.jobs)))
    except (OSError, ValueError) as error:
        print(f"batchjob: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="batchjob", description=__doc__)
    commands = parser.add_subparsers(required=True)
    report = commands.add_parser(
        "report", help="print the answers of a batch, and per job what the scheduler saw and did"
    )
    report.add_argument("output", type=Path, nargs="?", help="the output file of run_batch")
    report.add_argument("--jobs", type=Path, metavar="FILE", help="the file that BATCHJOB_REPORT named")
    return parser

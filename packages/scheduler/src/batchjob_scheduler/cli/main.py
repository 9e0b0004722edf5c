"""The arguments of the command ``batchjob``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from batchjob_scheduler.cli.doctor import findings, is_healthy
from batchjob_scheduler.cli.tables import answers_table, jobs_table
from batchjob_scheduler.report import Report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    if options.command == "doctor":
        return _doctor(options.additional_config, options.scheduler_cls)
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


def _doctor(additional_config: str | None, scheduler_cls: str | None) -> int:
    found = list(findings(additional_config, scheduler_cls))
    for finding in found:
        print(finding)
    return 0 if is_healthy(found) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="batchjob", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    report = commands.add_parser(
        "report", help="print the answers of a batch, and per job what the scheduler saw and did"
    )
    report.add_argument("output", type=Path, nargs="?", help="the output file of run_batch")
    report.add_argument("--jobs", type=Path, metavar="FILE", help="the file that BATCHJOB_REPORT named")
    doctor = commands.add_parser("doctor", help="say what would keep the scheduler from being on")
    doctor.add_argument("--additional-config", metavar="JSON", help="as it is given to vLLM")
    doctor.add_argument("--scheduler-cls", metavar="CLASS", help="as it is given to vLLM")
    return parser

"""The command ``batchjob``: shows what came of a batch."""

from batchjob_scheduler.cli.main import main

__all__ = ["main"]

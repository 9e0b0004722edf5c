"""The command ``batchjob``: shows what came of a batch, or why the scheduler is not on."""

from batchjob_scheduler.cli.main import main

__all__ = ["main"]

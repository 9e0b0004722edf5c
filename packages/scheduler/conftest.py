"""Doctests are collected from every module but the one that only imports beside vLLM."""

collect_ignore = ["src/batchjob_scheduler/scheduler.py"]

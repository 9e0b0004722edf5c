"""A scheduler for vLLM that knows which batch job a request belongs to.

Nothing is imported here: :mod:`batchjob_scheduler.scheduler` and :mod:`batchjob_scheduler.plugin`
need vLLM, the other modules do not.
"""

"""The rules of batch-job-aware scheduling as pure functions on frozen values.

Start at :func:`batchjob_spec.queue.offer`, the one function that says which waiting request is
next; its module says what is not promised. :mod:`batchjob_spec.model` is the whole system around it.
The rules have numbers (J1, E2, V3, ...), listed in ``docs/properties.md``.
"""

from batchjob_spec import blocks, estimator, invariants, jobs, model, ordering, queue, reservation
from batchjob_spec.errors import SpecError

__all__ = [
    "SpecError",
    "blocks",
    "estimator",
    "invariants",
    "jobs",
    "model",
    "ordering",
    "queue",
    "reservation",
]

"""Rules J1 to J4: which job a request belongs to, and which jobs have a place of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from batchjob_spec.estimator import Estimate

DEFAULT_JOB = "__default__"
"""J3: the job of a request that names none."""

MAX_IDLE_JOBS = 1024
"""J4: without a limit on jobs, how many that have nothing to do keep their statistics."""

_OPENING = "#job_name["


def tagged_job(request_id: str) -> str | None:
    """J1: the NAME of the first ``#job_name[NAME]#`` in the request ID, if there is one.

    >>> tagged_job("chatcmpl-#job_name[news]#req_001-5f3a")
    'news'
    >>> tagged_job("#job_name[]#job_name[a]#"), tagged_job("#job_name[a[b]]#"), tagged_job("req_001")
    ('a', None, None)

    post: __return__ is None or f"#job_name[{__return__}]#" in request_id
    post: __return__ is None or (__return__ != "" and not set(__return__) & set("[]"))
    post: __return__ is None or request_id.find("#job_name[") <= request_id.find(f"#job_name[{__return__}]#")
    """
    start = request_id.find(_OPENING)
    while start >= 0:
        rest = request_id[start + len(_OPENING) :]
        length = next((i for i, character in enumerate(rest) if character in "[]"), len(rest))
        if length > 0 and rest.startswith("]#", length):
            return rest[:length]
        start = request_id.find(_OPENING, start + 1)
    return None


def job_name(request_id: str, extra_args: Mapping[str, object] | None = None) -> str:
    """J1 to J3: ``job_name`` among the extra sampling arguments, else the tag, else the default job.

    Callers whose requests the engine numbers cannot write a tag, so the argument is theirs; it wins
    because it was given on purpose.

    >>> job_name("#job_name[news]#1", {"job_name": "chat"}), job_name("#job_name[news]#1", {"job_name": ""})
    ('chat', 'news')
    >>> job_name("1")
    '__default__'

    post: __return__ != ""
    """
    named = (extra_args or {}).get("job_name")
    if isinstance(named, str) and named:
        return named
    return tagged_job(request_id) or DEFAULT_JOB


@dataclass(frozen=True, slots=True)
class Job:
    """A job with a place of its own.

    ``appeared`` and ``last_used`` are moments of the state's clock; ``arrived`` and ``started``
    count its requests since it got its place. ``found`` is what the last of its requests to start found in
    the prefix cache, in tokens (V4).
    """

    name: str
    appeared: int
    last_used: int
    arrived: int = 0
    started: int = 0
    estimate: Estimate = field(default_factory=Estimate)
    found: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class JobTable:
    """J4: the jobs that have a place, in order of appearance, and the names that wait for one.

    The default job has a place beside the ``max_jobs`` others, since those without one share it.
    """

    max_jobs: int
    tracked: tuple[Job, ...] = ()
    displaced: tuple[str, ...] = ()

    def find(self, name: str) -> Job | None:
        """The tracked job of that name."""
        return next((job for job in self.tracked if job.name == name), None)

    def placed(self, name: str) -> Job:
        """The job under which requests that name ``name`` are scheduled."""
        job = self.find(name) or self.find(DEFAULT_JOB)
        assert job is not None, "a displaced name always has the default job beside it"
        return job

    def with_job(self, job: Job) -> JobTable:
        """The table with ``job`` in the place of its former self."""
        tracked = tuple(job if old.name == job.name else old for old in self.tracked)
        return replace(self, tracked=tracked)


def idle_jobs(table: JobTable, live: Collection[str]) -> tuple[Job, ...]:
    """The tracked jobs that have nothing waiting or running, the least recently used first.

    >>> table = JobTable(max_jobs=3, tracked=(Job("a", 0, 7), Job("b", 1, 4), Job("c", 2, 5)))
    >>> [job.name for job in idle_jobs(table, live={"c"})]
    ['b', 'a']

    post: not {job.name for job in __return__} & {*live, DEFAULT_JOB}
    post: all(earlier.last_used <= later.last_used for earlier, later in zip(__return__, __return__[1:]))
    """
    idle = (job for job in table.tracked if job.name not in live and job.name != DEFAULT_JOB)
    return tuple(sorted(idle, key=lambda job: job.last_used))


def has_free_place(table: JobTable) -> bool:
    """Whether one more job can be tracked without another one giving up its place.

    >>> has_free_place(JobTable(max_jobs=1)), has_free_place(JobTable(max_jobs=1, tracked=(Job("a", 0, 0),)))
    (True, False)
    """
    named = sum(job.name != DEFAULT_JOB for job in table.tracked)
    return table.max_jobs == 0 or named < table.max_jobs


def evict(table: JobTable, job: Job) -> JobTable:
    """J4: ``job`` gives up its place and its statistics.

    >>> evict(JobTable(max_jobs=1, tracked=(Job("a", 0, 0),)), Job("a", 0, 0)).tracked
    ()
    """
    return replace(table, tracked=tuple(old for old in table.tracked if old.name != job.name))


def track(table: JobTable, name: str, live: Collection[str], now: int) -> JobTable:
    """J4: give ``name`` a place, or note that it waits for one; ``live`` names jobs with requests.

    A job with requests keeps its place, since its statistics are in use. Nothing is ever refused: an
    exception here would end the engine and the whole batch.

    >>> full = track(JobTable(max_jobs=1), "a", {"a"}, now=0)
    >>> [job.name for job in track(full, "b", {"a", "b"}, now=1).tracked]
    ['a', '__default__']
    >>> [job.name for job in track(full, "b", {"b"}, now=1).tracked]
    ['b']

    pre: table.max_jobs >= 0
    pre: DEFAULT_JOB not in table.displaced
    post: DEFAULT_JOB not in __return__.displaced
    post: __return__.find(name) is not None or name in __return__.displaced
    post: __return__.displaced == table.displaced or __return__.find(DEFAULT_JOB) is not None
    """
    if table.find(name) or name in table.displaced:
        return table
    if name != DEFAULT_JOB and not has_free_place(table):
        idle = idle_jobs(table, live)
        if not idle:
            waiting_for_place = replace(table, displaced=(*table.displaced, name))
            return track(waiting_for_place, DEFAULT_JOB, live, now)
        table = evict(table, idle[0])
    return replace(table, tracked=(*table.tracked, Job(name, appeared=now, last_used=now)))


def settle(table: JobTable, live: Collection[str], now: int) -> tuple[JobTable, tuple[str, ...]]:
    """J4: after a request ended, hand free places to displaced names; also returns who got one.

    A displaced name without requests is forgotten. Without a limit on jobs, the statistics of
    the least recently used idle ones are.

    >>> full = JobTable(max_jobs=1, tracked=(Job("a", 0, 0), Job(DEFAULT_JOB, 1, 1)), displaced=("b",))
    >>> settle(full, live={"a", "b"}, now=2) == (full, ())
    True
    >>> table, promoted = settle(full, live={"b"}, now=2)   # the last request of "a" has ended
    >>> [job.name for job in table.tracked], promoted
    (['__default__', 'b'], ('b',))
    """
    table = replace(table, displaced=tuple(name for name in table.displaced if name in live))
    promoted: list[str] = []
    while table.displaced and (has_free_place(table) or idle_jobs(table, live)):
        name, *others = table.displaced
        table = track(replace(table, displaced=tuple(others)), name, live, now)
        promoted.append(name)
    idle = idle_jobs(table, live)
    if table.max_jobs == 0:
        for job in idle[: max(0, len(idle) - MAX_IDLE_JOBS)]:
            table = evict(table, job)
    return table, tuple(promoted)

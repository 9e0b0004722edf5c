"""A whole engine core without vLLM: it schedules, pretends to compute, and answers.

It makes the decisions of vLLM's synchronous scheduler for a dense model without prefix caching, over
any waiting queue, so a batch runs within a unit test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from batchjob_spec.blocks import blocks_for
from batchjob_spec.queue import Settings
from batchjob_testkit.engines import (
    MAX_IDLE_STEPS,
    STOP_TOKEN,
    EngineLimits,
    NoProgressError,
    Outcome,
    sampled_token,
)
from batchjob_testkit.fakes.engine import FakeEngine
from batchjob_testkit.fakes.fcfs_queue import FCFSQueue
from batchjob_testkit.fakes.request import FakeRequest

if TYPE_CHECKING:
    from batchjob_testkit.queues import RequestQueue


class FakeEngineCore:
    """Runs requests through a waiting queue, a step at a time.

    ``make_queue`` makes the queue from the engine as a queue sees it (:attr:`engine`), the settings,
    and whether ``policy=priority`` holds. A queue that has ``end`` hears of each request that is over;
    what a queue that has ``unservable`` names is failed with a reason.

    A running request that finds no room and is itself the one to be preempted ends the step for those
    that run behind it, or, with ``passes_over_self_preempted``, for itself alone; vLLM changed that.

    >>> core = FakeEngineCore(limits=EngineLimits(num_blocks=5))
    >>> request = core.submit("1", prompt_tokens=20, decode_tokens=3)
    >>> core.run()
    >>> core.steps
    [{'1': 20}, {'1': 1}, {'1': 1}]
    >>> core.outcomes["1"]
    Outcome(tokens=(101, 102, 1), finish_reason='stop', stop_reason=1)
    """

    def __init__(
        self,
        make_queue: Callable[[FakeEngine, Settings, bool], RequestQueue] = FCFSQueue,
        limits: EngineLimits | None = None,
        settings: Settings | None = None,
        *,
        passes_over_self_preempted: bool = False,
    ) -> None:
        self._passes_over_self_preempted = passes_over_self_preempted
        self.limits = limits or EngineLimits()
        self.engine = FakeEngine(
            self.limits.usable_blocks,
            self.limits.block_size,
            self.limits.max_num_batched_tokens,
            max_running=self.limits.max_num_seqs,
        )
        self._priority_policy = self.limits.policy == "priority"
        self.queue: Any = make_queue(self.engine, settings or Settings(), self._priority_policy)
        self.requests: dict[str, FakeRequest] = {}
        self.answers: list[tuple[str, Outcome]] = []
        self.steps: list[dict[str, int]] = []
        """The tokens scheduled per request, a step each."""
        self.used_blocks: list[int] = []
        """The blocks held while each step computes."""
        self._decode_tokens: dict[str, int] = {}
        self._tokens: dict[str, list[int]] = {}
        self._unreported: dict[str, bool] = {}

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """How each request that is over ended."""
        return dict(self.answers)

    @property
    def num_preemptions(self) -> int:
        """Preemptions of all requests."""
        return sum(request.num_preemptions for request in self.requests.values())

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return self.engine.free_blocks()

    @property
    def running_ids(self) -> list[str]:
        """The requests that run."""
        return [request.request_id for request in self.engine.running()]

    def submit(
        self,
        request_id: str,
        prompt_tokens: int,
        decode_tokens: int,
        *,
        max_tokens: int | None = None,
        priority: int = 0,
    ) -> FakeRequest:
        """A request arrives that decodes ``decode_tokens`` tokens, the last of them a stop token.

        With a smaller ``max_tokens`` it ends there, by its length cap.

        Raises:
            ValueError: if the ID is taken, or a length is impossible.
        """
        max_tokens = decode_tokens if max_tokens is None else max_tokens
        self._refuse_the_impossible(request_id, prompt_tokens, decode_tokens, max_tokens)
        request = FakeRequest(
            request_id,
            prompt_tokens,
            max_tokens,
            priority=priority,
            arrival_time=float(len(self.requests)),
        )
        self.requests[request_id] = request
        self._decode_tokens[request_id] = decode_tokens
        self._tokens[request_id] = []
        self.queue.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """The client goes away; of a request that is unknown or over, nothing changes."""
        if request_id in self._tokens:
            self._take_away(self.requests[request_id], "abort")

    def step(self) -> dict[str, int]:
        """One step of the engine; returns the tokens that it scheduled per request."""
        self._report_ends()
        scheduled = self._schedule()
        self.steps.append(dict(scheduled))
        self.used_blocks.append(self.engine.usable_blocks - self.engine.free_blocks())
        self._compute(scheduled)
        self._fail_what_never_fits()
        self._report_ends()
        return scheduled

    def run(self, *, max_idle_steps: int = MAX_IDLE_STEPS, max_steps: int = 100_000) -> None:
        """Step until every request has ended.

        Raises:
            NoProgressError: with the state, if that does not happen.
        """
        idle = 0
        for _ in range(max_steps):
            if not self._tokens:
                return
            idle = 0 if self.step() else idle + 1
            if idle > max_idle_steps:
                break
        if self._tokens:
            raise NoProgressError(f"after {len(self.steps)} steps: {self.describe()}")

    def describe(self) -> str:
        """What runs, what waits and what is free, in one line."""
        running = [
            f"{request.request_id} ({request.num_computed_tokens} of {request.num_tokens} tokens computed)"
            for request in self.engine.running()
        ]
        waiting = [f"{request.request_id} ({request.num_tokens} tokens)" for request in self.queue]
        lost = self._tokens.keys() - {*self.running_ids, *(request.request_id for request in self.queue)}
        return (
            f"running {running}, waiting {waiting}, in neither {sorted(lost)}, "
            f"{self.num_free_blocks} of {self.limits.usable_blocks} blocks free"
        )

    # --- scheduling ---------------------------------------------------------------------------------

    def _schedule(self) -> dict[str, int]:
        scheduled: dict[str, int] = {}
        budget = self._schedule_running(scheduled)
        self._schedule_waiting(scheduled, budget)
        return scheduled

    def _schedule_running(self, scheduled: dict[str, int]) -> int:
        """Schedule what runs; the tokens that are left for what waits, none after a preemption."""
        running = self.engine.running()
        budget = self.limits.max_num_batched_tokens
        preempted = False
        position = 0
        while position < len(running) and budget:
            request = running[position]
            new_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self.engine.allocate(request, new_tokens):
                preempted = True
                victim = self._victim()
                position -= running.index(victim) < position
                budget += scheduled.pop(victim.request_id, 0)
                self.engine.preempt(victim)
                self.queue.prepend_request(victim)
                if victim is request:
                    break
            else:
                scheduled[request.request_id] = new_tokens
                budget -= new_tokens
                position += 1
                continue
            if not self._passes_over_self_preempted:
                break
        return 0 if preempted else budget

    def _schedule_waiting(self, scheduled: dict[str, int], budget: int) -> None:
        running = self.engine.running()
        while budget and self.queue and len(running) < self.limits.max_num_seqs:
            request = self._offered()
            new_tokens = request.num_tokens - request.num_computed_tokens
            if new_tokens > budget and not self.limits.enable_chunked_prefill:
                return
            new_tokens = min(new_tokens, budget)
            if not self.engine.allocate(request, new_tokens, full_sequence_must_fit=True):
                return
            self.engine.run(self.queue.pop_request())
            scheduled[request.request_id] = new_tokens
            budget -= new_tokens

    def _offered(self) -> FakeRequest:
        request: FakeRequest = self.queue.peek_request()
        name = request.request_id
        assert name in self._tokens, f"Q1: the queue offers {name!r}, which is over: {self.describe()}"
        assert name not in self.running_ids, f"Q1: the queue offers {name!r}, which runs: {self.describe()}"
        return request

    def _victim(self) -> FakeRequest:
        running = self.engine.running()
        if self._priority_policy:
            return max(running, key=lambda request: (request.priority, request.arrival_time))
        return running[-1]

    # --- what comes of it ---------------------------------------------------------------------------

    def _compute(self, scheduled: dict[str, int]) -> None:
        for request_id, new_tokens in scheduled.items():
            request = self.requests[request_id]
            request.num_computed_tokens += new_tokens
            if request.num_computed_tokens == request.num_tokens:
                self._sample(request)

    def _sample(self, request: FakeRequest) -> None:
        request.num_output_tokens += 1
        token = sampled_token(request.num_output_tokens, self._decode_tokens[request.request_id])
        self._tokens[request.request_id].append(token)
        if token == STOP_TOKEN:
            self._take_away(request, "stop", token)
        elif request.num_output_tokens >= request.max_tokens:
            self._take_away(request, "length")

    def _fail_what_never_fits(self) -> None:
        limits = self.limits
        for request in getattr(self.queue, "unservable", list)():
            reason = (
                f"{request.num_tokens} tokens are {blocks_for(request.num_tokens, limits.block_size)} "
                f"blocks of {limits.block_size}, the pool has {limits.usable_blocks}"
            )
            self._take_away(request, "error", reason)

    def _take_away(
        self, request: FakeRequest, finish_reason: str, stop_reason: int | str | None = None
    ) -> None:
        if request in self.engine.running():
            self.engine.finish(request)
        else:
            self.queue.remove_requests([request])
        tokens = tuple(self._tokens.pop(request.request_id))
        self.answers.append((request.request_id, Outcome(tokens, finish_reason, stop_reason)))
        self._unreported[request.request_id] = finish_reason in ("stop", "length")

    def _report_ends(self) -> None:
        """Tell the queue, between the steps, what has ended, in the order of arrival."""
        if hasattr(self.queue, "end"):
            for request_id in sorted(self._unreported, key=lambda name: self.requests[name].arrival_time):
                self.queue.end(request_id, by_itself=self._unreported[request_id])
        self._unreported.clear()

    def _refuse_the_impossible(
        self, request_id: str, prompt_tokens: int, decode_tokens: int, max_tokens: int
    ) -> None:
        if request_id in self.requests:
            raise ValueError(f"request_id: got {request_id!r}, allowed: one that is not taken")
        lengths = {"prompt_tokens": prompt_tokens, "decode_tokens": decode_tokens, "max_tokens": max_tokens}
        for name, tokens in lengths.items():
            if tokens < 1:
                raise ValueError(f"{name} of {request_id!r}: got {tokens}, allowed: at least 1")
        if prompt_tokens + max_tokens > self.limits.max_model_len:
            raise ValueError(
                f"prompt_tokens + max_tokens of {request_id!r}: got {prompt_tokens} + {max_tokens}, "
                f"allowed: at most max_model_len={self.limits.max_model_len}"
            )

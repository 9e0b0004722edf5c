"""A batch to run: for each job, the prompt and output lengths of its requests, in tokens."""

from __future__ import annotations

from dataclasses import dataclass

from batchjob_testkit.fakes import FakeRequest


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """A request of ``job`` with a prompt of ``prompt_tokens`` that decodes ``output_tokens``.

    Its client allows ``max_tokens``, or with None as many as the model takes. Its prompt begins with the
    ``prefix_tokens`` tokens that its job's other prompts begin with.
    """

    job: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None = None
    prefix_tokens: int = 0
    priority: int = 0

    @property
    def finish_reason(self) -> str:
        """How it ends: by its length cap, or by itself before that.

        >>> WorkloadRequest("news", 5, 8, max_tokens=8).finish_reason
        'length'
        """
        return "length" if self.output_tokens == self.max_tokens else "stop"

    def fault(self, max_model_len: int) -> str | None:
        """What of its lengths is impossible with such a model, and what is allowed.

        >>> WorkloadRequest("news", 90, 20).fault(max_model_len=100)
        'prompt_tokens 90 + output_tokens 20 is 110, allowed: up to max_model_len 100'
        """
        lengths = {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}
        for name, tokens in lengths.items():
            if tokens < 1:
                return f"{name} is {tokens}, allowed: at least 1"
        if not 0 <= self.prefix_tokens <= self.prompt_tokens:
            return f"prefix_tokens is {self.prefix_tokens}, allowed: 0 to prompt_tokens {self.prompt_tokens}"
        if self.max_tokens is not None:
            if self.max_tokens < self.output_tokens:
                return (
                    f"max_tokens is {self.max_tokens}, allowed: at least output_tokens {self.output_tokens}"
                )
            lengths = {"prompt_tokens": self.prompt_tokens, "max_tokens": self.max_tokens}
        if sum(lengths.values()) > max_model_len:
            together = " + ".join(f"{name} {tokens}" for name, tokens in lengths.items())
            return f"{together} is {sum(lengths.values())}, allowed: up to max_model_len {max_model_len}"
        return None

    def request_id(self, number: int) -> str:
        """An ID with the tag of the job.

        >>> WorkloadRequest("news", 5, 8).request_id(3)
        '#job_name[news]#3'
        """
        return f"#job_name[{self.job}]#{number}"


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests for a model that takes up to ``max_model_len`` tokens of prompt and output.

    Raises:
        ValueError: for the first request whose lengths are impossible.

    >>> Workload(9, (WorkloadRequest("a", 9, 2),))
    Traceback (most recent call last):
        ...
    ValueError: request 0 of job 'a': prompt_tokens 9 + output_tokens 2 is 11, allowed: up to max_model_len 9
    """

    max_model_len: int
    requests: tuple[WorkloadRequest, ...]

    def __post_init__(self) -> None:
        for number, request in enumerate(self.requests):
            fault = request.fault(self.max_model_len)
            if fault is not None:
                raise ValueError(f"request {number} of job {request.job!r}: {fault}")

    def max_tokens_of(self, request: WorkloadRequest) -> int:
        """What the engine lets a request decode at most.

        >>> Workload(100, ()).max_tokens_of(WorkloadRequest("news", 5, 8))
        95
        """
        return request.max_tokens or self.max_model_len - request.prompt_tokens

    def of_job(self, job: str) -> tuple[WorkloadRequest, ...]:
        """The requests of one job, in their order."""
        return tuple(request for request in self.requests if request.job == job)

    def fake_requests(self) -> list[FakeRequest]:
        """The requests as a queue takes them; each may decode exactly its output length.

        >>> Workload(100, (WorkloadRequest("news", 5, 8),)).fake_requests()[0].request_id
        '#job_name[news]#0'
        """
        return [
            FakeRequest(request.request_id(number), request.prompt_tokens, request.output_tokens)
            for number, request in enumerate(self.requests)
        ]

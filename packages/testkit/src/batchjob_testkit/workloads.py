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

    >>> Workload(100, (WorkloadRequest("news", 90, 20),))
    Traceback (most recent call last):
        ...
    ValueError: request 0 of job 'news': prompt_tokens 90 + output_tokens 20, allowed: up to max_model_len 100
    """

    max_model_len: int
    requests: tuple[WorkloadRequest, ...]

    def __post_init__(self) -> None:
        for number, request in enumerate(self.requests):
            where = f"request {number} of job {request.job!r}"
            lengths = {"prompt_tokens": request.prompt_tokens, "output_tokens": request.output_tokens}
            for name, tokens in lengths.items():
                if tokens < 1:
                    raise ValueError(f"{where}: {name} is {tokens}, allowed: at least 1")
            if not 0 <= request.prefix_tokens <= request.prompt_tokens:
                allowed = f"0 to prompt_tokens {request.prompt_tokens}"
                raise ValueError(f"{where}: prefix_tokens is {request.prefix_tokens}, allowed: {allowed}")
            if request.max_tokens is not None:
                if request.max_tokens < request.output_tokens:
                    allowed = f"at least output_tokens {request.output_tokens}"
                    raise ValueError(f"{where}: max_tokens is {request.max_tokens}, allowed: {allowed}")
                lengths = {"prompt_tokens": request.prompt_tokens, "max_tokens": request.max_tokens}
            if sum(lengths.values()) > self.max_model_len:
                together = " + ".join(f"{name} {tokens}" for name, tokens in lengths.items())
                raise ValueError(f"{where}: {together}, allowed: up to max_model_len {self.max_model_len}")

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

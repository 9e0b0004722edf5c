"""A batch as a value: the limits of an engine, and what arrives, runs and is aborted on it in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from batchjob_testkit.engines import EngineLimits


@dataclass(frozen=True)
class Submit:
    """A request arrives that stops after ``decode_tokens`` or is cut at ``max_tokens``."""

    request_id: str
    prompt_tokens: int
    decode_tokens: int
    max_tokens: int
    priority: int = 0

    @property
    def output_tokens(self) -> int:
        """The tokens of its answer."""
        return min(self.decode_tokens, self.max_tokens)

    @property
    def finish_reason(self) -> str:
        """How it ends by itself."""
        return "stop" if self.decode_tokens <= self.max_tokens else "length"


@dataclass(frozen=True)
class Steps:
    """The engine makes so many steps."""

    count: int


@dataclass(frozen=True)
class Abort:
    """A request is aborted, whatever has become of it."""

    request_id: str


Event = Submit | Steps | Abort


@dataclass(frozen=True)
class Batch:
    """What happens on an engine of these limits."""

    limits: EngineLimits
    events: tuple[Event, ...]


class Target(Protocol):
    """What a batch can be played on."""

    def submit(
        self,
        request_id: str,
        prompt_tokens: int,
        decode_tokens: int,
        *,
        max_tokens: int | None = None,
        priority: int = 0,
    ) -> object:
        """A request arrives."""

    def abort(self, request_id: str) -> None:
        """A request is aborted."""

    def step(self) -> object:
        """One step."""


def play(events: tuple[Event, ...], target: Target) -> None:
    """Make the events happen on an engine; what is unfinished after them stays so."""
    for event in events:
        match event:
            case Submit():
                target.submit(
                    event.request_id,
                    event.prompt_tokens,
                    event.decode_tokens,
                    max_tokens=event.max_tokens,
                    priority=event.priority,
                )
            case Abort():
                target.abort(event.request_id)
            case Steps():
                for _ in range(event.count):
                    target.step()

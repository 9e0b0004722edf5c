"""What the specification raises when it is asked for something that has no meaning."""

from __future__ import annotations


class SpecError(ValueError):
    """The root of every error of this package."""


class WrongPhaseError(SpecError):
    """A transition was asked of a request that is not in the phase that it starts from."""

    def __init__(self, request_id: str, phase: str | None, allowed: str) -> None:
        self.request_id = request_id
        self.phase = phase
        self.allowed = allowed
        super().__init__(f"request {request_id!r} is {phase or 'unknown'}, allowed: {allowed}")


class DuplicateRequestError(SpecError):
    """A request arrived under an ID that is already in use (Q1)."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(f"request {request_id!r} arrived twice, allowed: once")

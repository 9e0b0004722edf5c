"""What a test did so far, so that a failure shows the way that led to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from batchjob_testkit.fakes import FakeEngine, FakeRequest


class History:
    """The events of one test, a line each, under the rule that the test checks.

    >>> history = History("Q4: len counts all that wait")
    >>> history.note("add_request(r0)")
    >>> history.check(2, 1)
    Traceback (most recent call last):
        ...
    AssertionError: Q4: len counts all that wait
      observed: 2
      expected: 1
      after:
         1. add_request(r0)
    """

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self.events: list[str] = []

    def note(self, event: str, engine: FakeEngine | None = None) -> None:
        """Something happened, and left the engine with so many free blocks."""
        free = "" if engine is None else f" ({engine.free_blocks()} of {engine.usable_blocks} blocks free)"
        self.events.append(event + free)

    def sum_up(self, since: int, event: str, engine: FakeEngine | None = None) -> None:
        """Say in one line what happened since there were so many events."""
        del self.events[since:]
        self.note(event, engine)

    def check(self, observed: Any, expected: Any, rule: str | None = None, *details: str) -> None:
        """The two are equal.

        Raises:
            AssertionError: with the rule, both sides, the details and the history.
        """
        __tracebackhide__ = True
        if observed != expected:
            raise self.failure(said(observed), said(expected), rule, *details)

    def failure(self, observed: str, expected: str, rule: str | None = None, *details: str) -> AssertionError:
        """The error that says the rule, both sides and the history."""
        after = (f"  {number:2}. {event}" for number, event in enumerate(self.events, start=1))
        lines = (f"observed: {observed}", f"expected: {expected}", *details, "after:", *after)
        return AssertionError("\n  ".join((rule or self.rule, *lines)))


# They change nothing and are asked after every event, so a history without them is easier to read.
_QUESTIONS = frozenset({"unservable"})


class Recorded:
    """Passes calls on to what is tested, and notes each with its answer.

    An exception of what is tested becomes a failure with the history.
    """

    def __init__(self, subject: Any, history: History) -> None:
        self._subject = subject
        self._history = history

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            __tracebackhide__ = True
            # An iterator can be read only once, and the history reads it, too.
            seen = [list(value) if isinstance(value, Iterator) else value for value in arguments]
            passed = [
                iter(copy) if isinstance(value, Iterator) else value
                for value, copy in zip(arguments, seen, strict=True)
            ]
            event = f"{method}({', '.join([*map(said, seen), *(f'{k}={v}' for k, v in options.items())])})"
            answer = self._guarded(event, lambda: getattr(self._subject, method)(*passed, **options))
            if method not in _QUESTIONS:
                self._history.note(event if answer is None else f"{event} -> {said(answer)}")
            return answer

        return call

    def __len__(self) -> int:
        length: int = self._guarded("len", lambda: len(self._subject))
        return length

    def __bool__(self) -> bool:
        truth: bool = self._guarded("bool", lambda: bool(self._subject))
        return truth

    def __iter__(self) -> Iterator[Any]:
        return iter(self._guarded("iter", lambda: list(self._subject)))

    def _guarded(self, event: str, call: Any) -> Any:
        __tracebackhide__ = True
        try:
            return call()
        except Exception as error:
            raise self._history.failure(f"{event} raises {error!r}", "an answer") from error


def said(value: Any) -> str:
    """A value as a failure shows it: a request by its ID.

    >>> said([FakeRequest("r0", num_prompt_tokens=5, max_tokens=8)])
    '[r0]'
    """
    if isinstance(value, FakeRequest):
        return value.request_id
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(said, value))}]"
    return repr(value)


def asked(request: FakeRequest) -> str:
    """What a failure says of a request as it arrives.

    >>> asked(FakeRequest("r0", num_prompt_tokens=5, max_tokens=8, priority=1))
    'r0 asks for 5 prompt tokens and at most 8 more, priority 1'
    """
    params = request.sampling_params
    extra = [f"priority {request.priority}"] if request.priority else []
    if params and params.min_tokens:
        extra.append(f"at least {params.min_tokens}")
    if params and params.extra_args:
        extra.append(f"extra_args={params.extra_args}")
    asks = f"{request.num_prompt_tokens} prompt tokens and at most {request.max_tokens} more"
    return ", ".join([f"{request.request_id} asks for {asks}", *extra])


def about(engine: FakeEngine) -> str:
    """What a failure says of an engine.

    >>> about(FakeEngine(usable_blocks=20))
    '20 blocks of 16 tokens (20 free), 8192 tokens a step, 0 look-ahead tokens'
    >>> about(FakeEngine(usable_blocks=20, lookahead_tokens=3, padding_tokens=2))
    '20 blocks of 16 tokens (20 free), 8192 tokens a step, 3 look-ahead and 2 padding tokens'
    """
    pool = f"{engine.usable_blocks} blocks of {engine.block_size} tokens ({engine.free_blocks()} free)"
    padding = f" and {engine.padding_tokens} padding" if engine.padding_tokens else ""
    beyond = f"{engine.lookahead_tokens} look-ahead{padding} tokens"
    return f"{pool}, {engine.step_tokens} tokens a step, {beyond}"


def rule_of(test_name: str) -> str:
    """The rule that the name of a test states.

    >>> rule_of("test_q3_removing_what_is_not_there_changes_nothing")
    'Q3: removing what is not there changes nothing'
    """
    words = test_name.removeprefix("test_").replace("_", " ")
    return re.sub(r"^([a-z]\d) ", lambda match: f"{match[1].upper()}: ", words)

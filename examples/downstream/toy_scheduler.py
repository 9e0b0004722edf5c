"""A waiting queue that runs short prompts first, and an estimator of decode lengths."""

from __future__ import annotations


class ShortestPromptFirst:
    """Knows nothing of jobs and claims what every queue of vLLM does: rules Q1 to Q3."""

    def __init__(self):
        self._requests = []
        self._peeked = None

    def __len__(self):
        return len(self._requests)

    def __bool__(self):
        return bool(self._requests)

    def __iter__(self):
        return iter(sorted(self._requests, key=lambda request: request.num_prompt_tokens))

    def add_request(self, request):
        self._requests.append(request)

    def peek_request(self):
        self._peeked = next(iter(self), None)
        if self._peeked is None:
            raise IndexError("no request waits")
        return self._peeked

    def pop_request(self):
        request = self._peeked or self.peek_request()
        self._requests.remove(request)
        self._peeked = None
        return request

    def prepend_request(self, request):
        self._requests.append(request)

    def prepend_requests(self, requests):
        self._requests.extend(requests)

    def remove_request(self, request):
        self.remove_requests([request])

    def remove_requests(self, requests):
        gone = set(requests)
        self._requests = [request for request in self._requests if request not in gone]
        if self._peeked in gone:
            self._peeked = None


class MovingAverage:
    """Rules E1, E2, E4 and E5."""

    def __init__(self, alpha):
        self.alpha = alpha
        self.average = None

    def observe(self, decoded_tokens):
        if self.average is None:
            self.average = decoded_tokens
        else:
            self.average = self.alpha * decoded_tokens + (1 - self.alpha) * self.average

    def predicted_tokens(self):
        return 128 if self.average is None else int(self.average)

    def remaining_tokens(self, output_tokens, min_tokens, max_tokens):
        length = min(max(self.predicted_tokens(), min_tokens, 1), max_tokens)
        return max(length - output_tokens, 1)

"""A fake clock, and an engine whose tokens take a known time on it."""

from clearhead.benchmark.inference_engine import InferenceEngine


class FakeClock:
    """Replaces the `time` module; it advances only by the engine and by sleeping."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class FakeEngine(InferenceEngine):
    """Generates 0, 1, 2 …; `rounds` has the seconds for the first token and for each later one, round by round."""

    weight_bytes, cache_element_bytes = 1000, 2

    def __init__(self, clock, name, weights, rounds, tokens=None):
        self.clock, self.name, self.weights, self.tokens = clock, name, weights, tokens
        self.rounds = [rounds[0], *rounds]  # the first round is the warm-up
        self.runs = []

    def generate(self, prompt, num_tokens, on_token):
        first, later = self.rounds[len(self.runs)]
        self.runs.append((self.clock.now, len(prompt), num_tokens))
        for number in range(num_tokens):
            self.clock.now += later if number else first
            on_token(number if self.tokens is None else self.tokens[number])

"""An engine whose every token takes a known time, on a clock that only it turns."""

from clearhead.benchmark.engine import Engine


class Clock:
    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Metronome(Engine):
    """Says 0, 1, 2 …; the rounds take these many seconds for the first token and for each other."""

    weight_bytes, cache_element_bytes = 1000, 2

    def __init__(self, clock, name, weights, rounds, tokens=None):
        self.clock, self.name, self.weights, self.tokens = clock, name, weights, tokens
        self.rounds = [rounds[0], *rounds]  # the first is for warming up
        self.turns = []

    def speak(self, prompt, num_tokens, hear):
        first, other = self.rounds[len(self.turns)]
        self.turns.append((self.clock.now, len(prompt), num_tokens))
        for number in range(num_tokens):
            self.clock.now += other if number else first
            hear(number if self.tokens is None else self.tokens[number])

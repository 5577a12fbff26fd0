"""What comes out of a generation: whole, or as it comes.

made = model.generate("Hello"); made.text, made.tokens, made.finish_reason
stream = model.stream("Hello"); text = "".join(stream); stream.generation.finish_reason
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from clearhead.architecture import ModelConfig
from clearhead.generation.transcript import Transcript


@dataclass(frozen=True)
class Generation:
    """What came out. str(generation) is its text."""

    tokens: list[int]  # new ones only, a stop token included
    text: str
    prompt_tokens: list[int]
    finish_reason: str  # stop, length (max_new_tokens), context (learned positions end), nothing (yet, or left alone)
    num_past_context: int = 0  # tokens read beyond `config.context`: others go on there, but were not made for it
    logprobs: list[float] | None = None  # of the tokens, where asked for
    top_logprobs: list[dict[int, float]] | None = None
    score: float | None = None  # of a beam: log p / length^length_penalty

    def __str__(self) -> str:
        return self.text

    @staticmethod
    def of(transcript: Transcript, config: ModelConfig, score: float | None = None) -> "Generation":
        row = transcript.row
        num_read = max(len(row.source), len(row.earlier) + len(row.prompt) + len(row.tokens) - 1)
        made = Generation(
            tokens=list(row.tokens),
            text=transcript.text,
            prompt_tokens=list(row.source or [*row.earlier, *row.prompt]),
            finish_reason=transcript.finish_reason,
            num_past_context=max(num_read - config.context, 0),
            score=score,
        )
        if row.options.logprobs is None:
            return made
        top = [dict(zip(step.top_ids.tolist(), step.top.tolist(), strict=True)) for step in row.logprobs]
        return replace(made, logprobs=[float(step.chosen) for step in row.logprobs], top_logprobs=top)


class Stream(Iterator[str]):
    """The text in pieces, each as soon as its characters are whole."""

    def __init__(self, transcript: Transcript, turns: Iterator[None], config: ModelConfig):
        self._transcript, self._turns, self._config = transcript, turns, config

    def __next__(self) -> str:
        next(self._turns)
        return self._transcript.read()

    @property
    def generation(self) -> Generation:
        """What has come so far."""
        return Generation.of(self._transcript, self._config)

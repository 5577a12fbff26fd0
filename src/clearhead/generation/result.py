"""The results of generation: Generation, a complete text, and Stream, a text that is being generated.

generation = model.generate("Hello"); generation.text, generation.tokens, generation.finish_reason
stream = model.stream("Hello"); text = "".join(stream); stream.generation.finish_reason
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape

from clearhead.architecture import ModelConfig
from clearhead.generation.sequences import FinishReason
from clearhead.generation.text_output import TextOutput

_MAX_SHOWN = 60  # characters of a text in a repr


@dataclass(frozen=True, repr=False)
class Generation:
    """A generated text; str(generation) is the text.

    finish_reason: stop (a stop token or stop string), length (max_new_tokens), context (the learned positions are
    used up) or unfinished (a stream that has not ended).
    """

    tokens: list[int]  # new tokens only, a stop token included
    text: str
    prompt_tokens: list[int]
    finish_reason: FinishReason
    num_past_context: int = 0  # tokens read beyond `config.context`, for which the model was not trained
    logprobs: list[float] | None = None  # of the tokens, if requested
    top_logprobs: list[dict[int, float]] | None = None  # of the most likely alternatives, by token id
    score: float | None = None  # of a beam: log p / length^length_penalty

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Generation({shorten(self.text)!r}, {self.summary})"

    def _repr_html_(self) -> str:
        return f'<div style="white-space: pre-wrap">{escape(self.text)}</div><small>{escape(self.summary)}</small>'

    @property
    def summary(self) -> str:
        """One line: the number of tokens, the finish reason, the score of a beam."""
        parts = [f"{len(self.tokens)} new tokens after {len(self.prompt_tokens)} prompt tokens", self.finish_reason]
        if self.score is not None:
            parts.append(f"score {self.score:.4f}")
        if self.num_past_context:
            parts.append(f"{self.num_past_context} tokens past the context")
        return ", ".join(parts)

    @staticmethod
    def from_output(output: TextOutput, config: ModelConfig, score: float | None = None) -> "Generation":
        """Return the result of a sequence, complete or as far as it has been generated."""
        sequence = output.sequence
        prompt = [*sequence.cached_tokens, *sequence.prompt]
        num_read = max(len(sequence.source), len(prompt) + len(sequence.tokens) - 1)  # the last token is not read
        generation = Generation(
            tokens=list(sequence.tokens),
            text=output.text,
            prompt_tokens=list(sequence.source or prompt),
            finish_reason=output.finish_reason,
            num_past_context=max(num_read - config.context, 0),
            score=score,
        )
        if sequence.options.logprobs is None:
            return generation
        top = [dict(zip(step.top_ids.tolist(), step.top.tolist(), strict=True)) for step in sequence.logprobs]
        return replace(generation, logprobs=[float(step.chosen) for step in sequence.logprobs], top_logprobs=top)


class Stream(Iterator[str]):
    """An iterator over a text that is being generated, in pieces of whole characters."""

    def __init__(self, output: TextOutput, steps: Iterator[None], config: ModelConfig):
        self._output = output
        self._config = config
        self._pieces = output.pieces(steps)

    def __next__(self) -> str:
        return next(self._pieces)

    def __repr__(self) -> str:
        return f"Stream({shorten(self._output.text)!r}, {self.generation.summary})"

    @property
    def generation(self) -> Generation:
        """What has been generated so far."""
        return Generation.from_output(self._output, self._config)


def shorten(text: str) -> str:
    """Return the text, cut to one line of output if it is long."""
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"

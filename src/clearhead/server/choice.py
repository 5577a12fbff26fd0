"""Choice: one text of an answer, from the events of the engine to pieces of text. Without HTTP.

    choice = Choice(0, request, tokenizer); piece = choice.push(events)

Stop strings, characters that are split over tokens, and log-probabilities are handled here, in the same way for streams
and complete answers, so that both have the same text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from clearhead.engine import Event, Request
from clearhead.generation import TextOutput, TokenSequence
from clearhead.server.token_scores import TokenScore, TokenScorer, step_scores
from clearhead.tokenization import Tokenizer

FinishReason = Literal["stop", "length"]  # those that OpenAI's clients accept
_UNLIMITED = 2**62


@dataclass(slots=True)  # not frozen: there is one for each token, and frozen fields are set slowly
class Piece:
    """New characters of a text, the scores of new tokens if they are asked for, and the reason when it ends."""

    index: int
    text: str = ""
    scores: Sequence[TokenScore] = ()
    finish_reason: FinishReason | None = None

    @property
    def is_only_text(self) -> bool:
        """Whether there are characters and nothing else."""
        return self.finish_reason is None and bool(self.text) and not self.scores


class Choice:
    """One text that is being generated. The last piece has a finish reason."""

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer | None,
        echo: str | None = None,
        visible: Mapping[int, str] | None = None,
    ):
        """Begin a text.

        echo: the text of the prompt, if the answer is to contain it. visible: special tokens that are part of the
        text, by their id.
        """
        self.index = index
        self._visible = visible or {}
        self.request = request
        self.num_cached_tokens = 0  # cached tokens of the prompt, known after the first event
        self.finish_reason: FinishReason | None = None
        self._sequence = TokenSequence(request.prompt, request.options, source=request.source)
        self._output = TextOutput(tokenizer, self._sequence)
        # Tokens are decoded one by one if the text may end after any of them, or if special tokens stand between them.
        self._decodes_singly = bool(request.options.stop or visible)
        self._tokenizer = tokenizer
        self._echo = echo  # None once it has been returned
        self._num_characters = len(echo or "")
        self._scorer = TokenScorer(tokenizer, _previous_id(request, tokenizer), self._num_characters)
        self._waiting: list[TokenScore] = []  # scores of tokens whose text is held back

    @property
    def num_tokens(self) -> int:
        """Number of tokens generated so far, a stop token included."""
        return len(self._sequence.tokens)

    def push(self, events: Sequence[Event]) -> Piece:
        """Return what these events add to the text, as one piece.

        A stop string ends the text, but the engine does not look for it and may go on; later events are ignored.
        """
        text, scores = "", list[TokenScore]()
        for event in events:
            if event.prompt is not None or self._echo is not None:
                echo, scores = self._take_echo(event)
                text += echo
            if event.token is not None:
                self._sequence.append(event.token, _UNLIMITED)
                if event.logprobs is not None:
                    self._waiting.append(self._scorer.score(event.token, *step_scores(event.logprobs)))
            if event.finish_reason is not None:
                self._sequence.finished = True
            if self._decodes_singly or event is events[-1]:
                added = self._output.update() + self._visible.get(-1 if event.token is None else event.token, "")
                self._num_characters += len(added)
                text += added
                if self._sequence.finished:
                    self.finish_reason = "stop" if self._output.finish_reason == "stop" else "length"
                    break
        scores = scores + self._take_scores() if self._waiting else scores
        return Piece(self.index, text, scores, self.finish_reason)

    def _take_echo(self, event: Event) -> tuple[str, list[TokenScore]]:
        """Return the text and the scores of the prompt with the first event, nothing later."""
        report = event.prompt
        if report is not None:
            self.num_cached_tokens = report.num_cached
        if self._echo is None:
            return "", []
        echo, self._echo = self._echo, None
        if report is None or report.logprobs is None:
            return echo, []
        scorer, prompt, logprobs = TokenScorer(self._tokenizer, None), self.request.prompt, report.logprobs
        rows = zip(prompt[1:], logprobs.chosen.tolist(), logprobs.top_ids.tolist(), logprobs.top.tolist(), strict=True)
        scores = [scorer.score(prompt[0], None, [])]
        scores += [scorer.score(token, chosen, list(zip(ids, top, strict=True))) for token, chosen, ids, top in rows]
        return echo, scores

    def _take_scores(self) -> list[TokenScore]:
        """Return the scores of the tokens that are part of the text by now; at the end, of all that belong to it."""
        count = 0
        while count < len(self._waiting) and self._waiting[count].offset < self._num_characters:
            count += 1
        if self.finish_reason is not None and not self._output.matcher.finished:
            count = len(self._waiting)
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken


def _previous_id(request: Request, tokenizer: Tokenizer | None) -> int | None:
    """Return the token that the text continues; None if it begins anew, after a special token or a source."""
    if tokenizer is None or request.source or not request.prompt:
        return None
    last = request.prompt[-1]
    return None if last in tokenizer.special_ids else last

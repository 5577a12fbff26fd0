"""Transcribe a recording: windows of 30 seconds one after another, and the language of the first.

    recording = Recording(features, network, speech); segments = recording.transcribe(Choices(timestamps=True))

A recording of one window is read once, unless timestamps are asked for. A longer one is always read with timestamps:
each window begins where the segments of the one before end (segments.py), as in transformers. There is no second
attempt at a higher temperature, and a window does not see the text of those before.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from clearhead.architecture import AudioEmbedding
from clearhead.checkpoint import SpeechSettings
from clearhead.errors import ClearheadError, unknown_name
from clearhead.model import EncoderOutput, Transformer
from clearhead.transcription.decoding import decode_window
from clearhead.transcription.rules import TokenRules
from clearhead.transcription.segments import TokenSegment, split_segments

Task = Literal["transcribe", "translate"]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a caller chooses."""

    language: str | None = None  # of the speech, such as "de"; None: the most likely one
    task: Task = "transcribe"  # translate: the text is in English
    timestamps: bool = False
    num_beams: int | None = None
    max_new_tokens: int | None = None  # of a window; None: as many as the model can read


@dataclass(frozen=True, eq=False)
class Recording:
    """The features of a recording, with the network that reads them."""

    features: Tensor  # (M, frames), at least one window
    network: Transformer
    speech: SpeechSettings

    @property
    def window(self) -> int:
        """Frames that the network reads at once."""
        encoder = self.network.config.encoder
        assert encoder is not None
        assert isinstance(encoder.embedding, AudioEmbedding)
        return 2 * encoder.embedding.num_positions

    def transcribe(self, choices: Choices) -> tuple[list[TokenSegment], str | None]:
        """Return the segments and the code of the language; None for a model that knows English only.

        Without timestamps, a recording of one window is a single segment, unless the model predicts timestamps anyway.
        """
        self._check(choices)
        encoder_output = self._encode(0)
        choices = replace(choices, language=choices.language or self.detect_language(encoder_output))
        num_frames = self.features.shape[1]
        rules = TokenRules(self.speech, choices.timestamps or num_frames > self.window)
        prompt = self.prompt(choices, rules.timestamps)
        limit = self.network.config.context - len(prompt)
        limit = limit if choices.max_new_tokens is None else min(limit, choices.max_new_tokens)
        segments, start = list[TokenSegment](), 0
        while start < num_frames:
            encoder_output = self._encode(start) if start else encoder_output
            tokens = decode_window(self.network, encoder_output, prompt, rules, limit, choices.num_beams)
            found, num_read = split_segments(
                tokens,
                first_timestamp=rules.first_timestamp,
                start_frame=start,
                num_frames=min(self.window, num_frames - start),
            )
            segments += found
            start += num_read
        return segments, choices.language

    def prompt(self, choices: Choices, timestamps: bool) -> list[int]:
        """Return the tokens that the decoder reads first: start, language, task, and whether there are timestamps."""
        tokens = [self.speech.start_id]
        if choices.language is not None and self.speech.languages:
            tokens.append(self.speech.languages[choices.language])
        if self.speech.languages and choices.task in self.speech.tasks:
            tokens.append(self.speech.tasks[choices.task])
        return tokens if timestamps else [*tokens, self.speech.no_timestamps_id]

    @torch.inference_mode()
    def detect_language(self, encoder_output: EncoderOutput) -> str | None:
        """Return the code of the likeliest language token after the start token; None for English-only models."""
        if not self.speech.languages:
            return None
        start = torch.tensor([[self.speech.start_id]], device=self.network.device)
        logits = self.network.decode(start, encoder_output)[0, -1]
        return max(self.speech.languages, key=lambda code: logits[self.speech.languages[code]].item())

    @torch.inference_mode()
    def _encode(self, start: int) -> EncoderOutput:
        """Run the encoder on the window that begins at a frame; what is beyond the end is 0."""
        part = self.features[:, start : start + self.window]
        padded = torch.nn.functional.pad(part, (0, self.window - part.shape[1]))
        return self.network.precompute_cross_attention(self.network.encode(padded[None].to(self.network.device)))

    def _check(self, choices: Choices) -> None:
        """Raise ClearheadError unless the model has the language and the task."""
        if choices.task not in ("transcribe", "translate"):
            raise unknown_name("task", str(choices.task), ("transcribe", "translate"))
        languages = self.speech.languages
        if choices.task == "translate" and "translate" not in self.speech.tasks:
            raise ClearheadError("this model cannot translate; leave out the task")
        if choices.language is None or (not languages and choices.language == "en"):
            return
        if not languages:
            raise ClearheadError(f"this model knows English only, not {choices.language!r}; leave out the language")
        if choices.language not in languages:
            raise unknown_name("language", choices.language, languages)

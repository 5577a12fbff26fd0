"""SpeechReader: what a model does with recordings of speech.

model = clearhead.load("path/to/whisper-folder"); print(model.transcribe("speech.wav").text)
"""

from dataclasses import dataclass

from clearhead.architecture import AudioEmbedding
from clearhead.audio import SAMPLING_RATE, Audio, log_mel, read_audio
from clearhead.checkpoint import ModelParts, SpeechSettings, speech_of_tokenizer
from clearhead.errors import ClearheadError
from clearhead.generation import explain_out_of_memory
from clearhead.options import check_positive_integer
from clearhead.tokenization import Tokenizer
from clearhead.transcription import Choices, Recording, Task, TokenSegment


@dataclass(frozen=True)
class Segment:
    """A part of a transcript and its place in the recording."""

    start: float  # seconds
    end: float
    text: str


@dataclass(frozen=True)
class Transcription:
    """The text of a recording. str() of it is the text."""

    text: str
    language: str | None  # code of the language spoken, such as "de"; None: a model that knows English only
    duration: float  # seconds
    segments: tuple[Segment, ...]  # one for the whole text, unless it was read with timestamps
    tokens: tuple[int, ...]  # timestamps included

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False, repr=False)
class SpeechReader(ModelParts):
    """The methods of Model that turn speech into text."""

    def transcribe(
        self,
        audio: Audio,
        *,
        sampling_rate: int | None = None,
        language: str | None = None,
        task: Task = "transcribe",
        timestamps: bool = False,
        beams: int | None = None,
        max_new_tokens: int | None = None,
    ) -> Transcription:
        """Return the text that is spoken in a recording; str() of the result is the text.

        A recording longer than what the model reads at once, which is 30 seconds, is read in windows, and its segments
        always have times.

        audio: the path of a WAV file, or samples from -1 to 1: an array or tensor (samples,) or (channels, samples).
        sampling_rate: of samples, in Hz. None means 16000. Another rate is converted to it.
        language: code of the language spoken, such as "de". None: the one that the model finds likeliest.
        task: "transcribe" writes down what is said, "translate" writes it in English.
        timestamps: return segments with the times at which they begin and end.
        beams: number of beams. None takes the likeliest token at each step.
        max_new_tokens: maximum number of tokens of a window. None: as many as the model can read.
        """
        encoder = self.network.config.encoder
        if encoder is None or not isinstance(encoder.embedding, AudioEmbedding):
            raise ClearheadError("this model reads text, not audio; load a speech model such as Whisper to transcribe")
        for name, number in (("beams", beams), ("max_new_tokens", max_new_tokens)):
            if number is not None:
                check_positive_integer(name, number)
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ClearheadError("this model has no tokenizer, which transcription needs; load a folder that has one")
        speech = self.speech or speech_of_tokenizer(self.network.config, tokenizer, self.special_ids)
        choices = Choices(
            language=language, task=task, timestamps=timestamps, num_beams=beams, max_new_tokens=max_new_tokens
        )
        samples = read_audio(audio, sampling_rate)
        features = log_mel(samples, encoder.embedding.num_mel_bands, 2 * encoder.embedding.num_positions)
        with explain_out_of_memory():
            segments, spoken = Recording(features, self.network, speech).transcribe(choices)
        return _to_text(segments, spoken, len(samples) / SAMPLING_RATE, tokenizer, speech)


def _to_text(
    segments: list[TokenSegment],
    language: str | None,
    duration: float,
    tokenizer: Tokenizer,
    speech: SpeechSettings,
) -> Transcription:
    """Return segments of tokens as text; times are cut off at the end of the recording."""
    tokens = tuple(token for segment in segments for token in segment.tokens)

    def decode(part: tuple[int, ...]) -> str:
        return tokenizer.decode(token for token in part if token <= speech.no_timestamps_id).strip()

    parts = [
        Segment(min(segment.start, duration), min(segment.end, duration), decode(segment.tokens))
        for segment in segments
    ]
    return Transcription(decode(tokens), language, duration, tuple(parts), tokens)

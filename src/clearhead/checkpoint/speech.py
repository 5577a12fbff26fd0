"""What the vocabulary of a speech model means: languages, tasks, timestamps, and tokens that no text contains.

    speech = read_speech(config, Settings(json_data, "generation_config.json")); speech.languages["de"]

Whisper's folders have it in generation_config.json; where that says nothing, the names of the tokens do. The features
of preprocessor_config.json are fixed (audio/mel.py), so that file is only checked.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clearhead.architecture import AudioEmbedding, ModelConfig
from clearhead.errors import ClearheadError, quote
from clearhead.families import Settings
from clearhead.files import read_json_object
from clearhead.tokenization import Tokenizer

FEATURES_FILE = "preprocessor_config.json"
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_TASKS = ("transcribe", "translate")
_MAX_INITIAL_TIMESTAMP = 50  # of every release: a text begins in the first second
_FEATURES = {"sampling_rate": 16000, "hop_length": 160, "n_fft": 400, "padding_value": 0.0}
_UNUSED_FEATURES = {"do_normalize": False, "dither": 0.0}


@dataclass(frozen=True, kw_only=True)
class SpeechSettings:
    """The special tokens of a speech model. The tokens after `no_timestamps_id` are times: 0.00, 0.02, 0.04, …"""

    start_id: int
    end_id: int
    no_timestamps_id: int
    languages: Mapping[str, int] = field(default_factory=dict)  # by code, such as "de"; empty: English only
    tasks: Mapping[str, int] = field(default_factory=dict)  # transcribe, translate (to English)
    suppressed: tuple[int, ...] = ()  # tokens that no text contains
    suppressed_first: tuple[int, ...] = ()  # tokens that no text begins with
    max_initial_timestamp: int | None = _MAX_INITIAL_TIMESTAMP  # steps of 0.02 seconds

    def settings(self, context: int) -> dict[str, Any]:
        """Return the content of generation_config.json from which `read_speech` reads these settings."""
        return {
            "decoder_start_token_id": self.start_id,
            "bos_token_id": self.end_id,
            "eos_token_id": self.end_id,
            "pad_token_id": self.end_id,
            "no_timestamps_token_id": self.no_timestamps_id,
            "is_multilingual": bool(self.languages),
            "lang_to_id": {f"<|{code}|>": token for code, token in self.languages.items()},
            "task_to_id": dict(self.tasks),
            "suppress_tokens": list(self.suppressed),
            "begin_suppress_tokens": list(self.suppressed_first),
            "max_initial_timestamp_index": self.max_initial_timestamp,
            "max_length": context,
        }


def read_speech(config: ModelConfig, settings: Settings) -> SpeechSettings | None:
    """Return the settings of a generation_config.json; None if it has none, or the model reads no audio."""
    if not config.reads_audio or "no_timestamps_token_id" not in settings:
        return None
    end = settings.token_ids("eos_token_id")
    languages = _ids(settings.object("lang_to_id"))
    index = "max_initial_timestamp_index"
    speech = SpeechSettings(
        start_id=settings.integer("decoder_start_token_id"),
        end_id=end if isinstance(end, int) else settings.integer("eos_token_id"),
        no_timestamps_id=settings.integer("no_timestamps_token_id"),
        languages={name.removeprefix("<|").removesuffix("|>"): token for name, token in languages.items()},
        tasks=_ids(settings.object("task_to_id")),
        suppressed=_id_list(settings, "suppress_tokens"),
        suppressed_first=_id_list(settings, "begin_suppress_tokens"),
        max_initial_timestamp=settings.integer(index) if index in settings else None,
    )
    return _check(speech, config, settings.where)


def _ids(settings: Settings) -> dict[str, int]:
    return {name: settings.integer(name) for name in settings.data}


def _id_list(settings: Settings, name: str) -> tuple[int, ...]:
    """Return a list of token ids; the -1 of English-only models is no token."""
    ids = [each for each in settings.array(name) if each != -1]
    invalid = next((each for each in ids if isinstance(each, bool) or not isinstance(each, int) or each < 0), None)
    if invalid is not None:
        raise ClearheadError(f"{settings.where}: {name!r} must be a list of token ids, but holds {quote(invalid)}")
    return tuple(ids)


def speech_tokens(num_timestamps: int) -> list[str]:
    """Return the special tokens of a small vocabulary for speech, in Whisper's order."""
    names = ("startoftranscript", "en", "de", "fr", *_TASKS, "notimestamps")
    times = (f"{2 * step / 100:.2f}" for step in range(num_timestamps))
    return [f"<|{name}|>" for name in (*names, *times)]


def speech_of_tokenizer(config: ModelConfig, tokenizer: Tokenizer, special_ids: Mapping[str, Any]) -> SpeechSettings:
    """Return the settings that the names of a tokenizer's special tokens imply."""
    special = {tokenizer.token_text(token): token for token in sorted(tokenizer.special_ids)}
    start, end, no_timestamps = names = ("<|startoftranscript|>", "<|endoftext|>", "<|notimestamps|>")
    missing = next((name for name in names if name not in special), None)
    if missing is not None:
        raise ClearheadError(f"the tokenizer has no special token {missing}, which transcription needs")
    others = [token for token in special.values() if token < special[no_timestamps] and token != special[end]]
    found = special_ids.get("suppress_tokens", others)
    languages = {match[1]: token for name, token in special.items() if (match := _LANGUAGE.fullmatch(name))}
    speech = SpeechSettings(
        start_id=special[start],
        end_id=special[end],
        no_timestamps_id=special[no_timestamps],
        languages=languages,
        tasks={task: special[f"<|{task}|>"] for task in _TASKS if f"<|{task}|>" in special},
        suppressed=tuple(found if isinstance(found, list) else [found]),
    )
    return _check(speech, config, "the tokenizer")


def _check(speech: SpeechSettings, config: ModelConfig, where: str) -> SpeechSettings:
    """Return the settings; raise ClearheadError if a token is outside the vocabulary."""
    ids = [speech.start_id, speech.end_id, speech.no_timestamps_id, *speech.languages.values(), *speech.tasks.values()]
    largest = max([*ids, *speech.suppressed, *speech.suppressed_first])
    if largest >= config.vocab_size:
        raise ClearheadError(f"{where} names token {largest}; the vocabulary has the ids 0 to {config.vocab_size - 1}")
    return speech


# --- the features


def check_features(folder: Path, config: ModelConfig) -> None:
    """Raise ClearheadError if a folder asks for other features than those that audio/mel.py computes."""
    if config.encoder is None or not isinstance(config.encoder.embedding, AudioEmbedding):
        return
    audio, settings = config.encoder.embedding, Settings(read_json_object(folder / FEATURES_FILE), FEATURES_FILE)
    for name, value in (_FEATURES | _UNUSED_FEATURES | {"feature_size": audio.num_mel_bands}).items():
        settings.allow_only(name, value)


def feature_settings(config: ModelConfig) -> dict[str, Any]:
    """Return the content of preprocessor_config.json, from which transformers computes the features."""
    assert config.encoder is not None
    audio = config.encoder.embedding
    assert isinstance(audio, AudioEmbedding)
    num_samples = 2 * audio.num_positions * _FEATURES["hop_length"]
    seconds = num_samples / _FEATURES["sampling_rate"]
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": audio.num_mel_bands,
        "chunk_length": int(seconds) if seconds.is_integer() else seconds,
        "return_attention_mask": False,
        **_FEATURES,
    }

"""Rules of generation_config.json about which tokens a text may contain: those that are used, and those that are not.

ids = read_generation_ids(Settings(json_data, "generation_config.json")); ids.get("forced_bos_token_id")

The first token of a text, the token that ends one of the maximum length, and single tokens that never occur are used.
A warning names every other rule that would change the text. Defaults of options (temperature, number of beams, ...) are
not rules: the caller chooses them.
"""

import warnings

from clearhead.errors import ClearheadError, quote
from clearhead.families import Settings

# Rules that transformers applies and we do not, with the value that means none
_UNUSED = {
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "min_length": 0,
    "begin_suppress_tokens": None,
    "forced_decoder_ids": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
}

_USED_IN_SPEECH = ("begin_suppress_tokens", "forced_decoder_ids")  # transcription has its own prompt (speech.py)


def read_generation_ids(settings: Settings, *, is_speech: bool = False) -> dict[str, int | list[int]]:
    """Return the special ids of generation_config.json, or of a config.json in its place; warn about other rules.

    is_speech: the rules are those of a speech model.
    """
    ids = settings.special_ids()
    banned, ignored = _read_banned(settings)
    unused = {name: none for name, none in _UNUSED.items() if not (is_speech and name in _USED_IN_SPEECH)}
    ignored += [name for name, none in unused.items() if settings.data.get(name) not in (None, none)]
    if banned:
        suppressed = ids.get("suppress_tokens", [])
        ids["suppress_tokens"] = sorted({*banned, *(suppressed if isinstance(suppressed, list) else [suppressed])})
    if ignored:
        warnings.warn(
            f"{settings.where} sets {', '.join(ignored)}, which generation does not use here; texts may differ from "
            "those of transformers",
            stacklevel=5,
        )
    return ids


def _read_banned(settings: Settings) -> tuple[list[int], list[str]]:
    """Return the tokens that `bad_words_ids` excludes, and its name if it also excludes sequences of tokens."""
    words = settings.array("bad_words_ids")
    for word in words:
        if not isinstance(word, list) or not all(isinstance(token, int) and token >= 0 for token in word):
            raise ClearheadError(f"{settings.where}: 'bad_words_ids' must be lists of token ids, not {quote(word)}")
    singles = [word[0] for word in words if len(word) == 1]
    return singles, ["bad_words_ids with several tokens"] if any(len(word) > 1 for word in words) else []

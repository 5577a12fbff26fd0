"""Translation between chosen languages, with models whose vocabulary has a token for each language (mBART, NLLB).

generator, prompts = choose_languages(model.text_generator, ["Hello"], "eng_Latn", "fra_Latn")
"""

from collections.abc import Sequence
from dataclasses import replace

from clearhead.errors import ClearheadError, unknown_name
from clearhead.generation import Prompt, TextGenerator, encode_prompt, require_tokenizer
from clearhead.tokenization import Tokenizer


def choose_languages(
    generator: TextGenerator, prompts: Sequence[Prompt], source_language: str | None, target_language: str | None
) -> tuple[TextGenerator, list[Prompt]]:
    """Return a generator whose texts begin with the token of a language, and the prompts with that of theirs."""
    if source_language is None and target_language is None:
        return generator, list(prompts)
    if not generator.network.config.is_encoder_decoder:
        check_no_languages(source_language, target_language)
    if target_language is not None:
        first = _language_id(generator.tokenizer, target_language)
        generator = replace(generator, special_ids={**generator.special_ids, "forced_bos_token_id": first})
    return generator, [_encode_source(generator.tokenizer, prompt, source_language) for prompt in prompts]


def check_no_languages(source_language: str | None, target_language: str | None) -> None:
    """Raise ClearheadError if a language is given to a model that has none."""
    if source_language is not None or target_language is not None:
        raise ClearheadError("this model has no tokens for languages; leave out source_language and target_language")


def _language_id(tokenizer: Tokenizer | None, language: str) -> int:
    """Return the token of a language, given as the token itself or, as in M2M-100, without the lines around it."""
    tokenizer = require_tokenizer(tokenizer)
    for token in (language, f"__{language}__"):
        ids = tokenizer.encode(token, add_special_tokens=False)
        if len(ids) == 1 and ids[0] in _language_ids(tokenizer):
            return ids[0]
    names = [tokenizer.token_text(token_id).strip("_") for token_id in sorted(_language_ids(tokenizer))]
    raise unknown_name("language", language, names)


def _encode_source(tokenizer: Tokenizer | None, prompt: Prompt, language: str | None) -> Prompt:
    """Return the tokens of a text with the token of its language in the place that the tokenizer has for it.

    Without a language, and for token ids, return the prompt as it is.
    """
    if language is None or not isinstance(prompt, str):
        return prompt
    chosen, ids = _language_id(tokenizer, language), encode_prompt(prompt, tokenizer)
    languages = _language_ids(require_tokenizer(tokenizer))
    if not languages.intersection(ids):
        return [chosen, *ids]
    return [chosen if token_id in languages else token_id for token_id in ids]


def _language_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the special tokens that have no other role."""
    roles = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.unknown_id}
    return frozenset(token_id for token_id in tokenizer.special_ids if token_id not in roles)

"""Pre-tokenization of byte-level vocabularies: the patterns that split a text before merging, by published name.

    gguf_pre_tokenization("smollm").patterns   # each digit by itself, then words with the space before them

Patterns are in the syntax of Oniguruma, which the `tokenizers` library uses: `\\z` is the end of the text there, and a
possessive `{1,3}+` is written as an atomic group `(?>...)`.
"""

from dataclasses import dataclass

from clearhead.errors import ClearheadError, quote, unknown_name

# Radford et al. 2019 (GPT-2), encoder.py of its release.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SINGLE_DIGITS_PATTERNS = (r"\p{N}", GPT2)

# Letters of scripts with upper and lower case
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    "ὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇ"
    "Ꞌ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(numbers: str) -> str:
    """Return the pattern of Llama 3 and Qwen (tokenizer.json of each), which differ in how they group digits."""
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
    )


def _cased_words(numbers: str, contraction: str) -> str:
    """Return the pattern of o200k and Mistral's tekken, whose words start anew at a capital after a small letter."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{contraction}|{start}{_UPPER}+{_LOWER}*{contraction}|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
    )


_O200K_PATTERN = _cased_words(r"\p{N}{1,3}", f"{_CONTRACTION}?")

# Source: tiktoken, tiktoken_ext/openai_public.py. White space at the end of a text is one piece.
TIKTOKEN_PATTERNS = {
    "r50k": GPT2,
    "p50k": GPT2,
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|(?>\p{N}{1,3})"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++\z|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "o200k": _O200K_PATTERN,
}


@dataclass(frozen=True, kw_only=True)
class PreTokenization:
    """What a `tokenizer.ggml.pre` name stands for: patterns that are applied in order, and further settings."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token as a whole is taken without merging
    normalizes_to_nfc: bool = False  # Unicode NFC before splitting
    adds_bos: bool = False


_WORDS_AND_THREE_DIGITS = PreTokenization(patterns=(_words(r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True)
_WORDS_AND_SINGLE_DIGITS = PreTokenization(patterns=(_words(r"\p{N}"),))
_GPT2 = PreTokenization(patterns=(GPT2,))
_SINGLE_DIGITS = PreTokenization(patterns=_SINGLE_DIGITS_PATTERNS)
_O200K = PreTokenization(patterns=(_O200K_PATTERN,))

# Names, patterns and defaults: llama.cpp, src/llama-vocab.cpp. If llama.cpp rewrites a pattern for its own regex
# engine, we use the pattern of the model's tokenizer.json; NFC is set for the models whose tokenizer.json has it.
GGUF_PRE_TOKENIZATIONS = {
    "gpt-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": PreTokenization(patterns=_SINGLE_DIGITS_PATTERNS, normalizes_to_nfc=True),
    "smollm": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "exaone": _SINGLE_DIGITS,
    "llama3": _WORDS_AND_THREE_DIGITS,
    "llama-v3": _WORDS_AND_THREE_DIGITS,
    "llama-bpe": _WORDS_AND_THREE_DIGITS,
    "falcon3": _WORDS_AND_THREE_DIGITS,
    "lfm2": _WORDS_AND_THREE_DIGITS,
    "dbrx": PreTokenization(patterns=_WORDS_AND_THREE_DIGITS.patterns),
    "qwen2": PreTokenization(patterns=_WORDS_AND_SINGLE_DIGITS.patterns, normalizes_to_nfc=True),
    "deepseek-r1-qwen": _WORDS_AND_SINGLE_DIGITS,
    "stablelm2": _WORDS_AND_SINGLE_DIGITS,
    "grok-2": _WORDS_AND_SINGLE_DIGITS,
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "tekken": PreTokenization(patterns=(_cased_words(r"\p{N}", ""),), ignore_merges=True, adds_bos=True),
    "falcon": PreTokenization(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenization(
        patterns=(
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
            r"\s+\z",
            "[一-龥ࠀ-一가-\ud7ff]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenization(
        patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
    ),
    "deepseek-v3": PreTokenization(
        patterns=(
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES_AND_SPACES}",
        )
    ),
    "default": PreTokenization(patterns=(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def tiktoken_pattern(name: str) -> str:
    """Return the pattern of a tiktoken encoding, by its name with or without `_base`."""
    short = name.removesuffix("_base")
    if short not in TIKTOKEN_PATTERNS:
        raise unknown_name("tiktoken encoding", name, TIKTOKEN_PATTERNS)
    return TIKTOKEN_PATTERNS[short]


def gguf_pre_tokenization(name: str) -> PreTokenization:
    """Return the pre-tokenization of a `tokenizer.ggml.pre` name."""
    if name not in GGUF_PRE_TOKENIZATIONS:
        known = ", ".join(sorted(GGUF_PRE_TOKENIZATIONS))
        raise ClearheadError(f"unknown pre-tokenizer {quote(name)} (tokenizer.ggml.pre); known names: {known}")
    return GGUF_PRE_TOKENIZATIONS[name]

"""How byte-level vocabularies cut text before they merge: one list of patterns per published name.

    SPLITS["smollm"]   # each digit alone, then words with the space before them

Patterns are in the syntax of Oniguruma, which the `tokenizers` library uses: `\\z` is the end of the
text there, and a possessive `{1,3}+` is written as an atomic group `(?>...)`.
"""

from dataclasses import dataclass

from clearhead.errors import ClearheadError, unknown_name

# Radford et al. 2019 (GPT-2), encoder.py of its release.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS_ALONE = (r"\p{N}", GPT2)

# Letters of scripts with two cases.
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
    """Llama 3's and Qwen's pattern (tokenizer.json of each): they differ in how digits are grouped."""
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
    )


def _cased_words(numbers: str, contraction: str) -> str:
    """Words that may start with capitals, but not change back to them: o200k and Mistral's tekken."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{contraction}|{start}{_UPPER}+{_LOWER}*{contraction}|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
    )


O200K = _cased_words(r"\p{N}{1,3}", f"{_CONTRACTION}?")

# tiktoken, tiktoken_ext/openai_public.py. At the end of a text a run of spaces and lines is one piece.
TIKTOKEN_SPLITS = {
    "r50k": GPT2,
    "p50k": GPT2,
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|(?>\p{N}{1,3})"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++\z|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "o200k": O200K,
}


@dataclass(frozen=True, kw_only=True)
class Split:
    """The patterns of one `tokenizer.ggml.pre` name, applied in turn, and what goes with the name."""

    patterns: tuple[str, ...]
    whole_words_first: bool = False
    composes_unicode: bool = False  # NFC first
    adds_bos: bool = False


_WORDS_AND_TRIPLES = Split(patterns=(_words(r"\p{N}{1,3}"),), whole_words_first=True, adds_bos=True)
_WORDS_AND_DIGITS = Split(patterns=(_words(r"\p{N}"),))
_GPT2 = Split(patterns=(GPT2,))
_DIGITS_ALONE = Split(patterns=DIGITS_ALONE)
_O200K = Split(patterns=(O200K,))

# llama.cpp, src/llama-vocab.cpp: names, patterns and defaults. Where it rewrites a model's pattern for
# its own regex engine, the pattern of that model's tokenizer.json stands here; so does NFC for those that have it.
GGUF_SPLITS = {
    "gpt-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "starcoder": _DIGITS_ALONE,
    "refact": _DIGITS_ALONE,
    "command-r": Split(patterns=DIGITS_ALONE, composes_unicode=True),
    "smollm": _DIGITS_ALONE,
    "codeshell": _DIGITS_ALONE,
    "exaone": _DIGITS_ALONE,
    "llama3": _WORDS_AND_TRIPLES,
    "llama-v3": _WORDS_AND_TRIPLES,
    "llama-bpe": _WORDS_AND_TRIPLES,
    "falcon3": _WORDS_AND_TRIPLES,
    "lfm2": _WORDS_AND_TRIPLES,
    "dbrx": Split(patterns=_WORDS_AND_TRIPLES.patterns),
    "qwen2": Split(patterns=_WORDS_AND_DIGITS.patterns, composes_unicode=True),
    "deepseek-r1-qwen": _WORDS_AND_DIGITS,
    "stablelm2": _WORDS_AND_DIGITS,
    "grok-2": _WORDS_AND_DIGITS,
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "tekken": Split(patterns=(_cased_words(r"\p{N}", ""),), whole_words_first=True, adds_bos=True),
    "falcon": Split(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": Split(
        patterns=(
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
            r"\s+\z",
            "[一-龥ࠀ-一가-\ud7ff]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Split(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "deepseek-v3": Split(
        patterns=(
            r"\p{N}{1,3}",
            "[一-龥\u3040-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES_AND_SPACES}",
        )
    ),
    "default": Split(patterns=(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def tiktoken_split(name: str) -> str:
    """The pattern of a rank file, by its encoding's name with or without `_base`."""
    short = name.removesuffix("_base")
    if short not in TIKTOKEN_SPLITS:
        raise unknown_name("tiktoken encoding", name, TIKTOKEN_SPLITS)
    return TIKTOKEN_SPLITS[short]


def gguf_split(name: str) -> Split:
    """The split of a `tokenizer.ggml.pre` name."""
    if name not in GGUF_SPLITS:
        known = ", ".join(sorted(GGUF_SPLITS))
        raise ClearheadError(f"unknown pre-tokenizer {name!r} (tokenizer.ggml.pre); known are: {known}")
    return GGUF_SPLITS[name]

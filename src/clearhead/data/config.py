"""Describe the training data: the [data] table of a recipe.

    [data]
    kind = "text_data"
    path = "tinyshakespeare.txt"
    context = 256

`open.py` builds the datasets. Relative paths start at the current directory.
"""

from dataclasses import dataclass
from typing import Literal

from clearhead.config import CheckedConfig
from clearhead.data.sources import Unit
from clearhead.data.synthetic import Task
from clearhead.errors import require

# translation: an encoder reads the source and a decoder writes the target.
# continuation: a decoder-only model reads the source and writes the target after it.
Form = Literal["translation", "continuation"]
# Limits of generated data, which is kept in memory.
_MAX_EXAMPLES, _MAX_LENGTH = 10_000_000, 1_000_000
_MAX_DIGITS = 4000  # digits of a number to add; Python converts at most 4,300


# --- objectives for long texts


@dataclass(frozen=True, kw_only=True)
class Causal:
    """Predict the next token, for a decoder."""


@dataclass(frozen=True, kw_only=True)
class Masked(CheckedConfig):
    """Predict masked tokens from both sides, for an encoder (BERT)."""

    mask_token: str = "[MASK]"
    share: float = 0.15  # share of the tokens to predict


@dataclass(frozen=True, kw_only=True)
class SpanCorruption(CheckedConfig):
    """Predict the spans that sentinel tokens replace, for an encoder-decoder (T5)."""

    sentinel: str = "<extra_id_{}>"  # {} is the number of the span, from 0
    share: float = 0.15  # share of the tokens to predict
    mean_length: float = 3.0  # mean length of a span in tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            "{}" in self.sentinel and self.mean_length >= 1,
            "SpanCorruption needs a sentinel that contains {} and a mean_length of at least 1; "
            f"got {self.sentinel!r} and {self.mean_length}",
        )


@dataclass(frozen=True, kw_only=True)
class LongText(CheckedConfig):
    """Common settings of text files and token shards: one long token sequence, read in rows of `context` tokens."""

    path: str  # a file, a folder of files, or a data set from `clearhead get`
    context: int  # tokens of one row
    validation_path: str | None = None  # texts to validate on
    validation_share: float = 0.1  # share of the tokens, at the end, that is held out if there is no validation_path
    rows: Literal["windows", "chunks", "packed"] = "windows"  # start anywhere; consecutive; whole documents together
    objective: Causal | Masked | SpanCorruption = Causal()

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.rows != "packed" or self.objective == Causal(),
            "packed rows support only the causal objective; use windows or chunks",
        )
        require(
            self.context >= 2 or not isinstance(self.objective, SpanCorruption),
            f"data.context is {self.context}; span corruption needs a context of at least 2 tokens, "
            "one to hide and one to keep",
        )


# --- sources of data


@dataclass(frozen=True, kw_only=True)
class TextData(LongText):
    """A text or JSON lines file, or a folder of them, tokenized in memory."""

    unit: Unit = "file"  # what counts as one document in a text file; in JSON lines it is always the line
    field: str = "text"  # key of the text in JSON lines


@dataclass(frozen=True, kw_only=True)
class ShardData(LongText):
    """A folder of token shards, which stay on disk."""


@dataclass(frozen=True, kw_only=True)
class ParallelFiles:
    """Two text files in which line n of one is the translation of line n of the other."""

    source: str  # file with one source text per line
    target: str  # file with one target text per line


@dataclass(frozen=True, kw_only=True)
class PairTable(CheckedConfig):
    """A .csv file or a tab-separated file. Columns are numbered from 0."""

    MAY_BE_ZERO = ("source_column", "target_column")

    path: str  # a .csv or tab-separated file
    source_column: int = 0
    target_column: int = 1
    header: bool = False  # whether the first line names the columns


@dataclass(frozen=True, kw_only=True)
class PairData(CheckedConfig):
    """Pairs of a source and a target text, such as sentences and their translations."""

    train: ParallelFiles | PairTable
    context: int  # maximum length of each side in tokens; longer pairs are dropped
    validation: ParallelFiles | PairTable | None = None
    validation_share: float = 0.1  # share of the distinct sources that is held out if there is no validation table
    form: Form = "translation"  # source and target for an encoder-decoder; or both in one row, for a decoder


@dataclass(frozen=True, kw_only=True)
class ChatData(CheckedConfig):
    """JSON lines or CSV of chats or of questions and answers. Only the assistant's messages are targets."""

    path: str  # a .jsonl or .csv file
    context: int  # maximum length in tokens; longer chats are dropped
    validation_path: str | None = None  # chats to validate on
    validation_share: float = 0.1  # share of the chats, at the end, that is held out if there is no validation_path


@dataclass(frozen=True, kw_only=True)
class PreferenceData(CheckedConfig):
    """JSON lines of prompts, each with a chosen and a rejected answer. Only the tokens of the answers are targets."""

    path: str  # a .jsonl file
    context: int  # maximum length in tokens; pairs with a longer chat are dropped
    validation_path: str | None = None  # preferences to validate on
    validation_share: float = 0.1  # share of the pairs, at the end, that is held out if there is no validation_path


@dataclass(frozen=True, kw_only=True)
class SyntheticData(CheckedConfig):
    """Generated examples of a small task; no file is read."""

    MAY_BE_ZERO = ("seed",)

    task: Task
    min_length: int = 1  # shortest source in characters; for addition, shortest number in digits
    max_length: int = 16  # longest source in characters; for addition, longest number in digits
    num_examples: int = 20_000  # number of training examples
    num_validation: int = 1_000  # number of validation examples
    seed: int = 0  # seed of the examples
    context: int = 128  # maximum length in tokens; longer examples are dropped
    form: Form = "translation"  # source and target for an encoder-decoder; or both in one row, for a decoder

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.min_length <= self.max_length,
            f"data.min_length is {self.min_length}; it must not exceed data.max_length, {self.max_length}",
        )
        longest = _MAX_DIGITS if self.task == "addition" else _MAX_LENGTH
        require(self.max_length <= longest, f"data.max_length is {self.max_length}; it must be at most {longest}")
        for name in ("num_examples", "num_validation"):
            number = getattr(self, name)
            require(number <= _MAX_EXAMPLES, f"data.{name} is {number}; it must be at most {_MAX_EXAMPLES}")


Data = TextData | ShardData | PairData | ChatData | PreferenceData | SyntheticData

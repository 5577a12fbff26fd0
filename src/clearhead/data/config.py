"""What to read, as data: the [data] table of a recipe.

    [data]
    kind = "text_data"
    path = "tinyshakespeare.txt"
    context = 256

`open.py` makes the datasets. Paths are taken from the folder in which the program runs.
"""

from dataclasses import dataclass
from typing import Literal

from clearhead.config import Checked
from clearhead.data.sources import Unit
from clearhead.data.synthetic import Task
from clearhead.errors import require

Form = Literal["translation", "continuation"]  # the answer comes from a decoder, or goes on where the question ends


# --- what is asked of a long text


@dataclass(frozen=True, kw_only=True)
class Causal:
    """The next token, for a decoder."""


@dataclass(frozen=True, kw_only=True)
class Masked(Checked):
    """Some tokens from both sides, for an encoder (BERT)."""

    mask_token: str = "[MASK]"
    share: float = 0.15


@dataclass(frozen=True, kw_only=True)
class SpanCorruption(Checked):
    """Hidden spans, for an encoder-decoder (T5)."""

    sentinel: str = "<extra_id_{}>"  # {} counts from 0
    share: float = 0.15
    mean_length: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            "{}" in self.sentinel and self.mean_length >= 1,
            "SpanCorruption needs a sentinel with {} for its number and a mean_length of 1 or more",
        )


@dataclass(frozen=True, kw_only=True)
class LongText(Checked):
    """What text files and token shards share: tokens in a row, read in rows of `context`."""

    path: str
    context: int
    validation_path: str | None = None
    validation_share: float = 0.1  # the last of the tokens, where there is no validation_path
    rows: Literal["windows", "chunks", "packed"] = "windows"  # anywhere; end to end; whole documents side by side
    objective: Causal | Masked | SpanCorruption = Causal()

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.rows != "packed" or self.objective == Causal(),
            "packed rows are for the causal objective; take windows or chunks",
        )
        require(
            self.context >= 2 or not isinstance(self.objective, SpanCorruption),
            "span corruption needs a context of 2 tokens or more: one to hide, one to show",
        )


# --- where data come from


@dataclass(frozen=True, kw_only=True)
class TextData(LongText):
    """A text or JSON lines file, or a folder of them, tokenized in memory."""

    unit: Unit = "file"  # what is a document; in JSON lines it is a line
    field: str = "text"  # of each line of JSON


@dataclass(frozen=True, kw_only=True)
class ShardData(LongText):
    """A folder of token shards, left on disk."""


@dataclass(frozen=True, kw_only=True)
class ParallelFiles:
    source: str
    target: str


@dataclass(frozen=True, kw_only=True)
class PairTable(Checked):
    """A tab-separated file; columns count from 0."""

    MAY_BE_ZERO = ("source_column", "target_column")

    path: str
    source_column: int = 0
    target_column: int = 1


@dataclass(frozen=True, kw_only=True)
class PairData(Checked):
    """Questions and answers, such as sentences and their translations."""

    train: ParallelFiles | PairTable
    context: int  # of either side; longer pairs are left out
    validation: ParallelFiles | PairTable | None = None
    validation_share: float = 0.1  # of the distinct sources, where there is no validation
    form: Form = "translation"


@dataclass(frozen=True, kw_only=True)
class ChatData(Checked):
    """JSON lines of chats; the assistant's words are learnt."""

    path: str
    context: int  # longer chats are left out
    validation_path: str | None = None
    validation_share: float = 0.1  # the last of the chats, where there is no validation_path


@dataclass(frozen=True, kw_only=True)
class SyntheticData(Checked):
    MAY_BE_ZERO = ("seed",)

    task: Task
    min_length: int = 1
    max_length: int = 16  # of the question, in characters; of each number in digits
    num_examples: int = 20_000
    num_validation: int = 1_000
    seed: int = 0
    context: int = 128
    form: Form = "translation"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.min_length <= self.max_length, f"min_length {self.min_length} is above max_length {self.max_length}"
        )


Data = TextData | ShardData | PairData | ChatData | SyntheticData

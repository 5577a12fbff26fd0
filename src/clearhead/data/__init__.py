"""Read files into batches for training.

Start with `batch.py`, the type that training consumes, and `open.py`, which turns a [data] table into datasets.

    batch           inputs and targets of one batch
    config          the [data] table: which files, how rows are cut, which objective
    sources         read texts, pairs and chats from files
    chats           the usual formats of instruction data
    preferences     prompts with a chosen and a rejected answer
    synthetic       generate examples of small tasks
    tokens          a long token sequence in memory
    shards          the same on disk, for corpora larger than memory
    objectives      token ids to inputs and targets
    readers         rows of a long text to batches, one class for each objective
    packing         pack documents into rows
    datasets        windows, chunks, packed documents, examples
    open            build the datasets of a [data] table
    loader          order, ranks, workers, resume
    counter_random  random numbers without state
    cmudict         write a pronunciation dictionary as a table
"""

from clearhead.data.batch import IGNORED, Batch, PreferenceBatch
from clearhead.data.config import Data, LongText, Masked, PairData, PreferenceData, SpanCorruption, SyntheticData
from clearhead.data.datasets import Examples
from clearhead.data.loader import Dataset, Loader, evaluation_batches
from clearhead.data.objectives import causal, count_noise, span_corruption_lengths, translation
from clearhead.data.open import decoder_start_id, open_data, tokenizer_texts
from clearhead.data.preferences import Preferences
from clearhead.data.shards import INDEX_FILE, ShardIndex, verify_shards, write_shards
from clearhead.data.sources import Pair, read_json_lines, read_parallel, read_table, read_text, read_texts
from clearhead.data.synthetic import make_example
from clearhead.data.tokens import document_ids

__all__ = [
    "IGNORED",
    "INDEX_FILE",
    "Batch",
    "Data",
    "Dataset",
    "Examples",
    "Loader",
    "LongText",
    "Masked",
    "Pair",
    "PairData",
    "PreferenceBatch",
    "PreferenceData",
    "Preferences",
    "ShardIndex",
    "SpanCorruption",
    "SyntheticData",
    "causal",
    "count_noise",
    "decoder_start_id",
    "document_ids",
    "evaluation_batches",
    "make_example",
    "open_data",
    "read_json_lines",
    "read_parallel",
    "read_table",
    "read_text",
    "read_texts",
    "span_corruption_lengths",
    "tokenizer_texts",
    "translation",
    "verify_shards",
    "write_shards",
]

"""From files to batches: what training reads.

Start at `batch.py` (the one thing that flows) and `open.py` (a [data] table to datasets). On the way:

    config        the [data] table: which files, which rows, what is asked
    sources       files to texts                      synthetic   tasks that need no file
    tokens        a long row of ids                   shards      the same on disk, larger than memory
    objectives    ids to inputs and targets           packing     documents to rows
    readers       long texts to batches               datasets    what can be asked for a batch by row numbers
    loader        order, ranks, workers, resume       draws       randomness without state
    cmudict       a dictionary of sounds as a table
"""

from clearhead.data.batch import (
    IGNORED,
    Batch,
)
from clearhead.data.config import (
    Data,
    LongText,
    Masked,
    PairData,
    SpanCorruption,
    SyntheticData,
)
from clearhead.data.datasets import (
    Examples,
)
from clearhead.data.loader import (
    Dataset,
    Loader,
    in_order,
)
from clearhead.data.objectives import (
    noise_of,
    span_lengths,
)
from clearhead.data.open import (
    open_data,
    start_id,
    texts_of,
)
from clearhead.data.shards import (
    INDEX,
    Index,
    verify_shards,
    write_shards,
)
from clearhead.data.sources import (
    Pair,
    read_json_lines,
    read_parallel,
    read_table,
    read_text,
    read_texts,
)
from clearhead.data.tokens import (
    document_ids,
)

__all__ = [
    "IGNORED",
    "INDEX",
    "Batch",
    "Data",
    "Dataset",
    "Examples",
    "Index",
    "Loader",
    "LongText",
    "Masked",
    "Pair",
    "PairData",
    "SpanCorruption",
    "SyntheticData",
    "document_ids",
    "in_order",
    "noise_of",
    "open_data",
    "read_json_lines",
    "read_parallel",
    "read_table",
    "read_text",
    "read_texts",
    "span_lengths",
    "start_id",
    "texts_of",
    "verify_shards",
    "write_shards",
]

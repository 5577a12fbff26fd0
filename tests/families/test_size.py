"""How many lines a model type takes: a row of a table for a decoder, and on average with everything they share."""

from pathlib import Path

import clearhead.families
from clearhead.families import FAMILIES
from clearhead.families.decoders import ROWS

FOLDER = Path(clearhead.families.__file__).parent
MAX_LINES = 120


def num_lines(pattern):
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in FOLDER.glob(pattern))


def test_a_row_of_the_decoders_takes_at_most_120_lines_on_average_also_with_the_code_that_reads_rows():
    assert len(ROWS) >= 30
    assert num_lines("decoder_rows_*.py") / len(ROWS) <= MAX_LINES / 2
    assert num_lines("decoder*.py") / len(ROWS) <= MAX_LINES


def test_a_model_type_takes_at_most_120_lines_on_average_with_everything_that_they_share():
    """What reads and writes other file formats, and the sizes of tiny models, belongs to no family."""
    model_types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(model_types) == len(set(model_types))
    num_other = num_lines("gguf*.py") + num_lines("ctranslate2.py") + num_lines("tiny.py")
    assert (num_lines("*.py") - num_other) / len(model_types) <= MAX_LINES

"""All decoder-only model types that are rows of a table: one Family for each row.

    FAMILIES[0].read_config(Settings(json_data, "config.json"))

The rows are in decoder_rows_*.py: relatives together, so that no file is long.
"""

from clearhead.families import (
    decoder_rows_gemma,
    decoder_rows_glm,
    decoder_rows_gpt,
    decoder_rows_llama,
    decoder_rows_mixtures,
    decoder_rows_opt,
    decoder_rows_phi,
)
from clearhead.families.decoder_writing import decoder_family

_TABLES = (
    decoder_rows_gpt,
    decoder_rows_opt,
    decoder_rows_phi,
    decoder_rows_llama,
    decoder_rows_gemma,
    decoder_rows_glm,
    decoder_rows_mixtures,
)
ROWS = tuple(row for table in _TABLES for row in table.ROWS)
FAMILIES = tuple(decoder_family(row) for row in ROWS)

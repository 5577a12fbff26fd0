"""All decoder-only model types that are rows of a table: one Family for each row.

    FAMILIES[0].read_config(Settings(json_data, "config.json"))

The rows are in decoders_gpt.py, decoders_opt.py, decoders_phi.py, decoders_llama.py, decoders_gemma.py,
decoders_glm.py and decoders_experts.py.
"""

from clearhead.families import (
    decoders_experts,
    decoders_gemma,
    decoders_glm,
    decoders_gpt,
    decoders_llama,
    decoders_opt,
    decoders_phi,
)
from clearhead.families.decoder_writing import decoder_family

_TABLES = (
    decoders_gpt,
    decoders_opt,
    decoders_phi,
    decoders_llama,
    decoders_gemma,
    decoders_glm,
    decoders_experts,
)
ROWS = tuple(row for table in _TABLES for row in table.ROWS)
FAMILIES = tuple(decoder_family(row) for row in ROWS)

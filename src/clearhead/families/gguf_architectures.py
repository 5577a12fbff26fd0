"""All architectures of GGUF files that are read and written.

    ARCHITECTURES["phi3"].tensor_names["blk.{layer}.attn_qkv.weight"]

The writer takes the first architecture that expresses a model.
"""

from clearhead.families.gguf_decoders import DECODERS
from clearhead.families.gguf_encoders import ENCODERS
from clearhead.families.gguf_mixtures import MIXTURES
from clearhead.families.gguf_row import GgufArchitecture

ARCHITECTURES: dict[str, GgufArchitecture] = {**DECODERS, **MIXTURES, **ENCODERS}

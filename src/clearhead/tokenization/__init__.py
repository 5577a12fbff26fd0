"""Text to token ids and back. Imports no torch.

Start at `base.py` (what a tokenizer offers), then `load.py` (files to tokenizers) and `chat.py`
(messages to a prompt). The algorithms are those of the `tokenizers` library, which `fast.py` wraps.
"""

from clearhead.tokenization.base import (
    StreamDecoder,
    Tokenizer,
)
from clearhead.tokenization.characters import (
    byte_tokenizer,
)
from clearhead.tokenization.chat import (
    render_chat,
)
from clearhead.tokenization.fast import (
    SpecialTokens,
)
from clearhead.tokenization.gguf_vocabulary import (
    from_gguf,
)
from clearhead.tokenization.load import (
    load_tokenizer,
)
from clearhead.tokenization.marian import (
    CTRANSLATE2_VOCABULARY,
    load_marian,
    marian_files,
    read_vocabulary,
)
from clearhead.tokenization.train import (
    train_tokenizer,
)

__all__ = [
    "CTRANSLATE2_VOCABULARY",
    "SpecialTokens",
    "StreamDecoder",
    "Tokenizer",
    "byte_tokenizer",
    "from_gguf",
    "load_marian",
    "load_tokenizer",
    "marian_files",
    "read_vocabulary",
    "render_chat",
    "train",
    "train_tokenizer",
]

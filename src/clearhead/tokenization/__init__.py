"""Text to token ids and back. Imports no torch.

Start at `base.py` (what a tokenizer offers), then `load.py` (files to tokenizers) and `chat.py`
(messages to a prompt). The algorithms are those of the `tokenizers` library, which `fast.py` wraps.
"""

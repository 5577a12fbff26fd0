"""Tokens on their way from the GPU to the host."""

import torch
from torch import Tensor


class AsyncTokens:
    """Tokens that are being copied from the GPU to the host; `result` waits for this copy and nothing later."""

    def __init__(self, tokens: Tensor):
        self.host_tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        self.host_tokens.copy_(tokens, non_blocking=True)
        self.copied = torch.cuda.Event()
        self.copied.record()

    def result(self) -> list[int]:
        """Wait for the copy and return the tokens."""
        self.copied.synchronize()
        return self.host_tokens.tolist()

"""Choose the next tokens on the GPU with the options of their seats, without sorting or waiting for the host.

sampler = Sampler(seats, num_rows=64, adjust=False); tokens = sampler.choose(logits, seats.active[:64])
"""

import torch
from torch import Tensor

from clearhead.backends.cuda.seats import Seats

_SMALL_BATCH = 8  # rows up to which chunks are small, so that every multiprocessor has one


class Sampler:
    """Buffers and launches of the sampling kernels for a fixed number of rows."""

    def __init__(self, seats: Seats, num_rows: int, adjust: bool):
        """adjust: apply penalties, biases and minimum lengths, for which the seats have tables of the vocabulary."""
        self.seats, self.adjust = seats, adjust
        self.chunk = 1024 if num_rows <= _SMALL_BATCH else 4096
        self.num_chunks = -(-seats.vocab_size // self.chunk)
        shape, device = (num_rows, self.num_chunks), seats.device
        self.maxima, self.sums = (torch.zeros(shape, device=device) for _ in range(2))
        self.bests = torch.zeros(shape, dtype=torch.float64, device=device)
        self.places, self.best_places = (torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2))
        self.chosen = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def choose(self, logits: Tensor, active: Tensor) -> Tensor:
        """Return the next tokens (B,), -1 where logits (B, V) are not finite, and advance the columns of their seats.

        active (B,): the seat of each row, -1 for none. The tokens are in a buffer that the next call overwrites.
        """
        from clearhead.backends.cuda.triton_sampling import choose_tokens, scan_logits

        seats, num_rows = self.seats, len(logits)
        counts, bias = (seats.integers, seats.numbers)  # no pointers, unless they are needed
        if self.adjust:
            assert seats.counts is not None
            assert seats.bias is not None
            counts, bias = seats.counts, seats.bias
        partial = self.maxima, self.places, self.sums, self.bests, self.best_places
        inputs = logits, active, seats.integers, seats.numbers, counts, bias, seats.num_seats
        # Products and sums are rounded one by one, as in the reference.
        options = {"V": seats.vocab_size, "ADJUST": self.adjust, "enable_fp_fusion": False}
        scan_logits[num_rows, self.num_chunks](*partial, *inputs, CHUNK=self.chunk, BLOCK=1024, num_warps=4, **options)
        choose_tokens[(num_rows,)](
            self.chosen, *partial, *inputs, CHUNKS=self.num_chunks, BLOCK_C=1 << (self.num_chunks - 1).bit_length(),
            BLOCK=4096, num_warps=16, **options,
        )  # fmt: skip
        return self.chosen[:num_rows]

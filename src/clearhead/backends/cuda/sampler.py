"""Choose the next tokens on the GPU with the options of their seats, without sorting or waiting for the host.

sampler = Sampler(seats, num_rows=64, adjust=False); tokens = sampler.choose(logits, seats.active[:64])
"""

import torch
from torch import Tensor

from clearhead.backends.cuda.launch import dependent_launch
from clearhead.backends.cuda.seats import Seats

_MAX_CANDIDATES = 64  # tokens of a row that may win the draw; about 12 are expected
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
        self.places = torch.zeros(shape, dtype=torch.int32, device=device)
        self.ranks = torch.zeros(*shape, 6, dtype=torch.int32, device=device)
        self.masses = torch.zeros(*shape, 6, device=device)
        self.num_candidates = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.candidates = torch.zeros(num_rows, _MAX_CANDIDATES, dtype=torch.float64, device=device)
        self.candidate_values = torch.zeros(num_rows, _MAX_CANDIDATES, device=device)
        self.candidate_places = torch.zeros(num_rows, _MAX_CANDIDATES, dtype=torch.int32, device=device)
        self.chosen = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def choose(self, logits: Tensor, active: Tensor) -> Tensor:
        """Return the next tokens (B,), -1 where logits (B, V) are not finite, and advance the columns of their seats.

        active (B,): the seat of each row, -1 for none. The tokens are in a buffer that the next call overwrites.
        """
        from clearhead.backends.cuda import triton_sampling as kernels
        from clearhead.backends.cuda.triton_candidates import check_candidates

        seats, num_rows = self.seats, len(logits)
        counts, bias = (seats.integers, seats.numbers)  # placeholders, which the kernel does not read
        if self.adjust:
            assert seats.counts is not None
            assert seats.bias is not None
            counts, bias = seats.counts, seats.bias
        inputs = logits, active, seats.integers, seats.numbers, counts, bias, seats.num_seats
        found = self.num_candidates, self.candidates, self.candidate_values, self.candidate_places
        joined = self.maxima, self.sums
        # Products and sums are rounded one by one, as in the reference.
        launch = dependent_launch(seats.device)
        options = {"V": seats.vocab_size, "ADJUST": self.adjust, "enable_fp_fusion": False} | launch
        more = {"CHUNKS": self.num_chunks, "BLOCK_C": 1 << (self.num_chunks - 1).bit_length(), "MAX": _MAX_CANDIDATES}
        grid, tile = (num_rows, self.num_chunks), {"CHUNK": self.chunk, "BLOCK": 512, "num_warps": 4}
        kernels.scan_logits[grid](
            self.maxima,
            self.places,
            self.sums,
            self.num_candidates,
            *inputs,
            CHUNK=self.chunk,
            num_warps=self.chunk // 512,
            **options,
        )
        kernels.draw_candidates[grid](
            self.num_candidates,
            self.candidate_values,
            self.candidate_places,
            *joined,
            *inputs,
            **tile,
            **more,
            **options,
        )
        kernels.add_noise_to_candidates[(num_rows,)](
            *found, *joined, active, seats.integers, seats.numbers, seats.num_seats, num_warps=2, **more, **launch
        )
        check_candidates[grid](self.ranks, self.masses, *found, *joined, *inputs, **tile, **more, **options)
        kernels.choose_tokens[(num_rows,)](
            self.chosen, self.places, self.ranks, self.masses, *found, *joined, *inputs, BLOCK=4096, num_warps=16,
            **more, **options,
        )  # fmt: skip
        return self.chosen[:num_rows]

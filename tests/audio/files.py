"""Write WAV files for tests.

write_wav(path, samples, rate=16_000, bits=16, channels=1)
"""

import wave
from pathlib import Path

import numpy as np
import torch


def wav_bytes(samples: np.ndarray, bits: int) -> bytes:
    """Return numbers from -1 to 1 as little-endian integers; 8 bits are unsigned."""
    largest = 2 ** (bits - 1) - 1
    integers = np.round(samples.astype(np.float64) * largest).astype(np.int64)
    integers += 128 if bits == 8 else 0
    return integers.astype("<i8")[:, None].view(np.uint8)[:, : bits // 8].tobytes()


def write_wav(path: Path, samples: torch.Tensor, rate: int = 16_000, bits: int = 16, channels: int = 1) -> None:
    """Write samples (N,), the same in every channel, or (N, channels)."""
    frames = samples.numpy() if samples.ndim == 2 else samples.numpy()[:, None].repeat(channels, axis=1)
    with wave.open(str(path), "wb") as file:
        file.setparams((frames.shape[1], bits // 8, rate, 0, "NONE", ""))
        file.writeframes(wav_bytes(frames.reshape(-1), bits))

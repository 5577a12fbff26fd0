"""WAV files, numpy arrays and tensors to samples at 16 kHz.

samples = read_audio("speech.wav"); samples = read_audio(array, sampling_rate=44_100)

Samples are numbers from -1 to 1. Channels are averaged. Only PCM is read, uncompressed integers of 8 to 32 bits.
"""

import io
import wave
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clearhead.audio.resampling import resample
from clearhead.errors import ClearheadError
from clearhead.files import read_bytes

Audio = str | Path | np.ndarray | Tensor
SAMPLING_RATE = 16_000  # of the models
MAX_WAV_BYTES = 1 << 28  # two hours at 16 kHz with 16 bits
_MIN_RATE, _MAX_RATE = 1_000, 384_000
_CONVERT = "convert it with: ffmpeg -i INPUT -ac 1 -ar 16000 -c:a pcm_s16le OUTPUT.wav"


def read_audio(audio: Audio, sampling_rate: int | None = None) -> Tensor:
    """Return samples (N,) in float32 at 16 kHz.

    audio: the path of a WAV file, or samples: an array or tensor (N,), or (channels, N), of floating-point numbers.
    sampling_rate: of samples; None means 16 kHz. A file says its own.
    """
    if isinstance(audio, str | Path):
        if sampling_rate is not None:
            raise ClearheadError("a WAV file says its sampling rate; leave out sampling_rate")
        samples, rate = read_wav(Path(audio))
    else:
        samples, rate = _to_samples(audio), SAMPLING_RATE if sampling_rate is None else sampling_rate
    if isinstance(rate, bool) or not isinstance(rate, int) or not _MIN_RATE <= rate <= _MAX_RATE:
        raise ClearheadError(
            f"the sampling rate is {rate!r}; it must be a whole number from {_MIN_RATE} to {_MAX_RATE}"
        )
    if len(samples) == 0:
        raise ClearheadError("the audio has no samples; give it some sound")
    return resample(samples, rate, SAMPLING_RATE)


def _to_samples(audio: object) -> Tensor:
    """Return an array or a tensor as samples (N,) in float32; raise ClearheadError if it holds anything else."""
    if isinstance(audio, np.ndarray) and audio.dtype.kind in "fiu":
        audio = torch.from_numpy(np.ascontiguousarray(audio, dtype=audio.dtype.newbyteorder("=")))
    if not isinstance(audio, Tensor):
        raise ClearheadError("the audio must be the path of a WAV file, a numpy array of numbers or a tensor")
    if not audio.is_floating_point():
        raise ClearheadError(f"samples must be floating-point numbers from -1 to 1, not {audio.dtype}; divide them")
    if audio.ndim not in (1, 2):
        raise ClearheadError(
            f"the samples have shape {tuple(audio.shape)}; it must be (samples,) or (channels, samples)"
        )
    samples = audio.detach().cpu().float()
    samples = samples if samples.ndim == 1 else samples.mean(dim=0)
    if not bool(samples.isfinite().all()):
        raise ClearheadError("the samples contain infinite numbers or NaN; give finite ones from -1 to 1")
    return samples


def read_wav(path: Path) -> tuple[Tensor, int]:
    """Return the samples (N,) of a WAV file in float32, averaged over channels, and its sampling rate."""
    content = read_bytes(path, MAX_WAV_BYTES)
    try:
        with wave.open(io.BytesIO(content)) as file:
            num_channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            data = file.readframes(min(file.getnframes(), len(content)))
    except (wave.Error, EOFError, RuntimeError, ValueError) as error:  # what damaged files raise in this module
        reason = str(error) or "it ends too early"
        raise ClearheadError(f"{path} is not a PCM WAV file ({reason}); {_CONVERT}") from None
    if not 1 <= width <= 4 or num_channels < 1:
        raise ClearheadError(f"{path} has samples of {8 * width} bits, which are not read; {_CONVERT}")
    frame_bytes = width * num_channels
    frames = np.frombuffer(data, np.uint8, count=len(data) // frame_bytes * frame_bytes)
    samples = _to_floats(frames.reshape(-1, width)).reshape(-1, num_channels).mean(axis=1, dtype=np.float64)
    return torch.from_numpy(samples.astype(np.float32)), rate


def _to_floats(samples: np.ndarray) -> np.ndarray:
    """Return integers, given as little-endian bytes (N, width), as numbers from -1 to 1; 8 bits are unsigned."""
    width = samples.shape[1]
    if width == 1:
        return (samples[:, 0].astype(np.float32) - 128) / 128
    padded = np.zeros((len(samples), 4), np.uint8)
    padded[:, 4 - width :] = samples  # in the upper bytes, so that the sign is in its place
    return padded.view("<i4")[:, 0].astype(np.float64) / 2**31

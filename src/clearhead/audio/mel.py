"""Samples to the logarithms of mel bands, the features that Whisper reads (Radford et al. 2022, §2.2).

    features = log_mel(samples, num_bands=80, min_frames=3000)     # 30 seconds: (80, 3000)

Every 10 ms, a Hann window of 25 ms is transformed (FFT), and the power of its frequencies is summed in bands whose
widths follow the mel scale. The logarithms are cut off 8 below the largest and scaled:

    x = max(log10(bands), max(log10(bands)) - 8);  features = (x + 4) / 4
"""

import torch
from torch import Tensor

_WINDOW, SAMPLES_PER_FRAME = 400, 160  # samples at 16 kHz
FRAMES_PER_SECOND = 100
_MAX_FREQUENCY = 8000.0  # Hz, half of the sampling rate
_SMALLEST = 1e-10  # power of silence
_BLOCK = 1 << 14  # frames transformed at a time

# The mel scale of Slaney's Auditory Toolbox: linear up to 1000 Hz, logarithmic above
_HZ_PER_MEL, _KNEE_HZ = 200 / 3, 1000.0
_KNEE_MEL, _LOG_STEP = _KNEE_HZ / _HZ_PER_MEL, torch.log(torch.tensor(6.4, dtype=torch.float64)).item() / 27


def mel_filters(num_bands: int) -> Tensor:
    """Return the weights (num_bands, 201) of the frequencies 0 to 8000 Hz in each band.

    Bands are triangles that overlap by half, scaled to equal area.
    """
    largest = _KNEE_MEL + torch.log(torch.tensor(_MAX_FREQUENCY / _KNEE_HZ, dtype=torch.float64)).item() / _LOG_STEP
    mels = torch.linspace(0, largest, num_bands + 2, dtype=torch.float64)
    corners = torch.where(mels < _KNEE_MEL, mels * _HZ_PER_MEL, _KNEE_HZ * torch.exp(_LOG_STEP * (mels - _KNEE_MEL)))
    frequencies = torch.linspace(0, _MAX_FREQUENCY, _WINDOW // 2 + 1, dtype=torch.float64)
    left, center, right = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (frequencies - left) / (center - left), (right - frequencies) / (right - center)
    return torch.minimum(rising, falling).clamp(min=0) * (2 / (right - left))


@torch.inference_mode()
def log_mel(samples: Tensor, num_bands: int, min_frames: int) -> Tensor:
    """Return features (num_bands, frames) of samples (N,) at 16 kHz; shorter audio is padded with silence."""
    samples = torch.nn.functional.pad(samples, (0, max(0, min_frames * SAMPLES_PER_FRAME - len(samples))))
    num_frames = len(samples) // SAMPLES_PER_FRAME
    half = _WINDOW // 2
    padded = torch.nn.functional.pad(samples[None], (half, half), mode="reflect")[0]
    window, filters = torch.hann_window(_WINDOW), mel_filters(num_bands).float()
    blocks = []
    for start in range(0, num_frames, _BLOCK):
        count = min(_BLOCK, num_frames - start)
        first = start * SAMPLES_PER_FRAME
        part = padded[first : first + (count - 1) * SAMPLES_PER_FRAME + _WINDOW]
        spectrum = torch.stft(part, _WINDOW, SAMPLES_PER_FRAME, window=window, center=False, return_complex=True)
        blocks.append((filters @ spectrum.abs() ** 2).clamp(min=_SMALLEST).log10())
    logarithms = torch.cat(blocks, dim=1)
    return (torch.maximum(logarithms, logarithms.max() - 8.0) + 4.0) / 4.0

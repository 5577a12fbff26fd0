"""Sound as numbers: read WAV files, change the sampling rate, compute the features that speech models read.

samples = read_audio("speech.wav"); features = log_mel(samples, num_bands=80, min_frames=3000)

wav         WAV files, numpy arrays and tensors to samples at 16 kHz
resampling  another sampling rate, by windowed-sinc interpolation
mel         samples to the logarithms of mel bands
"""

from clearhead.audio.mel import FRAMES_PER_SECOND, SAMPLES_PER_FRAME, log_mel, mel_filters
from clearhead.audio.resampling import resample
from clearhead.audio.wav import SAMPLING_RATE, Audio, read_audio, read_wav

__all__ = [
    "FRAMES_PER_SECOND",
    "SAMPLES_PER_FRAME",
    "SAMPLING_RATE",
    "Audio",
    "log_mel",
    "mel_filters",
    "read_audio",
    "read_wav",
    "resample",
]

"""Mel bands equal those of transformers' feature extractor."""

import pytest
import torch
from transformers import WhisperFeatureExtractor

from clearhead.audio import log_mel, mel_filters
from tests.transcription.toys import warble


@pytest.mark.parametrize("num_bands", [80, 128])
def test_filters_equal_those_of_transformers(num_bands):
    theirs = torch.from_numpy(WhisperFeatureExtractor(feature_size=num_bands).mel_filters).T
    assert (mel_filters(num_bands) - theirs).abs().max() < 1e-15


@pytest.mark.parametrize("num_bands", [80, 128])
@pytest.mark.parametrize("seconds", [0.01, 3.7, 30.0])
def test_features_equal_those_of_transformers(num_bands, seconds):
    samples = warble(seconds)
    theirs = WhisperFeatureExtractor(feature_size=num_bands)(samples.numpy(), sampling_rate=16_000)
    ours = log_mel(samples, num_bands, min_frames=3000)
    assert ours.shape == (num_bands, 3000)
    assert (ours - torch.from_numpy(theirs["input_features"][0])).abs().max() <= 1e-5


def test_a_long_recording_is_one_piece(monkeypatch):
    """The largest value is that of the whole recording, and blocks of frames leave no seam."""
    samples = warble(31.234)
    monkeypatch.setattr("clearhead.audio.mel._BLOCK", 1000)
    extractor = WhisperFeatureExtractor()
    theirs = extractor(samples.numpy(), sampling_rate=16_000, truncation=False, padding="longest")
    ours = log_mel(samples, 80, min_frames=3000)
    assert (ours - torch.from_numpy(theirs["input_features"][0])).abs().max() <= 1e-5


def test_silence_has_features():
    assert torch.equal(log_mel(torch.zeros(1000), 80, min_frames=100), torch.full((80, 100), -1.5))

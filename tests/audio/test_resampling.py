"""Resampling compared with tones, whose samples at any rate are known."""

import math

import pytest
import torch

from clearhead.audio.resampling import resample


def tone(frequency, rate, seconds=0.5):
    return torch.sin(2 * math.pi * frequency * torch.arange(round(seconds * rate), dtype=torch.float64) / rate)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 15_999])
def test_a_tone_keeps_its_frequency_loudness_and_phase(rate):
    highest = 0.9 * min(rate, 16_000) / 2
    for frequency in (50.0, 440.0, highest):
        ours, exact = resample(tone(frequency, rate), rate, 16_000), tone(frequency, 16_000)
        assert abs(len(ours) - len(exact)) <= 1
        inside = slice(200, 7800)  # the ends see the silence around the recording
        assert (ours[inside] - exact[inside]).abs().max() < 3e-4, frequency


@pytest.mark.parametrize("rate", [24_000, 44_100, 48_000])
def test_tones_above_half_of_the_new_rate_vanish(rate):
    for frequency in (8_400.0, 10_000.0):
        assert resample(tone(frequency, rate), rate, 16_000)[200:7800].abs().max() < 3e-4


def test_a_constant_stays_constant():
    assert (resample(torch.ones(9000, dtype=torch.float64), 44_100, 16_000)[200:3000] - 1).abs().max() < 3e-4


@pytest.mark.parametrize(("num_samples", "rate", "expected"), [(441, 44_100, 160), (1, 48_000, 1), (3, 8_000, 6)])
def test_the_length_is_rounded_up(num_samples, rate, expected):
    assert len(resample(torch.zeros(num_samples), rate, 16_000)) == expected


def test_the_same_rate_changes_nothing():
    samples = torch.randn(100)
    assert resample(samples, 16_000, 16_000) is samples


def test_blocks_leave_no_seam(monkeypatch):
    samples = torch.randn(5000)
    whole = resample(samples, 22_050, 16_000)
    monkeypatch.setattr("clearhead.audio.resampling._BLOCK", 37)
    assert torch.equal(resample(samples, 22_050, 16_000), whole)

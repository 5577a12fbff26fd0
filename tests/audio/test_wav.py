"""WAV files of every width, arrays and tensors; everything else is refused in one sentence."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.audio import read_audio, read_wav
from clearhead.errors import ClearheadError
from tests.audio.files import write_wav
from tests.transcription.toys import warble


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
@pytest.mark.parametrize("channels", [1, 2, 6])
def test_samples_come_back(bits, channels, tmp_path):
    samples = warble(0.3)
    write_wav(tmp_path / "a.wav", samples, rate=22_050, bits=bits, channels=channels)
    read, rate = read_wav(tmp_path / "a.wav")
    assert rate == 22_050
    assert read.dtype == torch.float32
    assert (read - samples).abs().max() <= 1.6 / 2 ** (bits - 1) + 1e-6


def test_channels_are_averaged(tmp_path):
    left, right = warble(0.1), torch.zeros(1600)
    write_wav(tmp_path / "a.wav", torch.stack((left, right), dim=1))
    assert (read_audio(tmp_path / "a.wav") - left / 2).abs().max() < 1e-4
    assert torch.equal(read_audio(torch.stack((left, right))), left / 2)


def test_the_extreme_values_are_those_of_the_format(tmp_path):
    """-32768 of 16 bits is -1, and 0 of unsigned 8 bits too."""
    write_wav(tmp_path / "a.wav", torch.full((4,), -32768 / 32767))
    assert read_wav(tmp_path / "a.wav")[0].tolist() == [-1.0] * 4
    write_wav(tmp_path / "a.wav", torch.full((4,), -128 / 127), bits=8)
    assert read_wav(tmp_path / "a.wav")[0].tolist() == [-1.0] * 4


def test_arrays_and_tensors_give_the_same_samples():
    samples = warble(0.2)
    assert torch.equal(read_audio(samples.numpy()), samples)
    assert torch.equal(read_audio(samples.double().numpy()), samples)
    assert torch.equal(read_audio(samples.numpy().astype(">f4")), samples)
    assert len(read_audio(warble(0.2, rate=8000), sampling_rate=8000)) == 3200


@pytest.mark.parametrize(
    ("audio", "options", "message"),
    [
        (torch.zeros(4, dtype=torch.int16), {}, "floating-point"),
        (np.zeros(4, dtype=np.int16), {}, "floating-point"),
        (np.array(["a"]), {}, "numpy array of numbers"),
        ([0.1, 0.2], {}, "must be the path"),
        (torch.zeros(2, 3, 4), {}, r"shape \(2, 3, 4\)"),
        (torch.zeros(0), {}, "no samples"),
        (torch.zeros(0, 3), {}, "NaN"),
        (torch.full((3,), float("inf")), {}, "infinite"),
        (torch.zeros(4), {"sampling_rate": 0}, "sampling rate is 0"),
        (torch.zeros(4), {"sampling_rate": 16000.0}, "sampling rate is 16000.0"),
        (torch.zeros(4), {"sampling_rate": 10**9}, "sampling rate is 1000000000"),
        ("speech.wav", {"sampling_rate": 8000}, "says its sampling rate"),
        ("missing.wav", {}, "missing.wav"),
    ],
)
def test_other_audio_is_refused(audio, options, message):
    with pytest.raises(ClearheadError, match=message):
        read_audio(audio, **options)


@pytest.mark.parametrize("content", [b"", b"RIFF", b"ID3 an mp3 file", b"RIFF\x10\0\0\0WAVEfmt \xff\xff\xff\xff"])
def test_other_files_are_refused_with_the_way_out(content, tmp_path):
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(ClearheadError, match=r"a\.wav is not a PCM WAV file .*ffmpeg"):
        read_wav(tmp_path / "a.wav")


def test_floating_point_files_are_refused(tmp_path):
    write_wav(tmp_path / "a.wav", warble(0.01), bits=32)
    content = bytearray((tmp_path / "a.wav").read_bytes())
    content[20] = 3  # WAVE_FORMAT_IEEE_FLOAT
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(ClearheadError, match="unknown format: 3"):
        read_wav(tmp_path / "a.wav")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_files_are_read_or_refused(data, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    write_wav(folder / "damaged.wav", warble(0.01), channels=data.draw(st.sampled_from((1, 2))))
    content = bytearray((folder / "damaged.wav").read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, 60))] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, len(content))) :]
    (folder / "damaged.wav").write_bytes(content)
    try:
        samples = read_audio(folder / "damaged.wav")
    except ClearheadError:
        return
    assert bool(samples.isfinite().all())

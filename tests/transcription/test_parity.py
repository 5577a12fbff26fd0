"""Texts, times and languages equal those of transformers' generate, with the same features."""

import pytest
import torch

import clearhead
from clearhead.audio import log_mel
from clearhead.checkpoint.huggingface import load_folder
from clearhead.transcription import Choices, Recording
from tests.transcription.toys import BANDS, FIRST_TIMESTAMP, NUM_POSITIONS, make_folder, warble

MAX_NEW = 40


def features_of(seconds, seed=0):
    return log_mel(warble(seconds, seed=seed), BANDS, 2 * NUM_POSITIONS)


def recording(folder, features):
    parts = load_folder(folder)
    assert parts.speech is not None
    return Recording(features, parts.network, parts.speech)


def text_of(tokens):
    return [token for token in tokens if token < FIRST_TIMESTAMP]


@pytest.mark.parametrize("beams", [None, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_short_recording_without_timestamps(beams, seed, tmp_path):
    model, features = make_folder(tmp_path, seed), features_of(0.8, seed)
    with torch.no_grad():
        theirs = model.generate(
            features[None],
            language="de",
            task="transcribe",
            max_new_tokens=MAX_NEW,
            num_beams=beams or 1,
            return_segments=True,
        )["segments"][0]
    choices = Choices(language="de", num_beams=beams, max_new_tokens=MAX_NEW)
    segments, language = recording(tmp_path, features).transcribe(choices)
    assert [text_of(each.tokens) for each in segments] == [text_of(each["tokens"].tolist()) for each in theirs]
    assert language == "de"


@pytest.mark.parametrize("beams", [None, 3])
@pytest.mark.parametrize("seconds", [0.8, 1.0, 3.37])
@pytest.mark.parametrize("seed", range(6))
def test_timestamps_and_long_recordings(beams, seconds, seed, tmp_path):
    """Segments, their times and the windows they come from; the last recording has three to dozens of windows."""
    model, features = make_folder(tmp_path, seed), features_of(seconds, seed)
    with torch.no_grad():
        theirs = model.generate(
            features[None],
            language="fr",
            task="translate",
            max_new_tokens=MAX_NEW,
            num_beams=beams or 1,
            return_timestamps=True,
            return_segments=True,
        )["segments"][0]
    choices = Choices(language="fr", task="translate", timestamps=True, num_beams=beams, max_new_tokens=MAX_NEW)
    ours, _ = recording(tmp_path, features).transcribe(choices)
    assert [text_of(segment.tokens) for segment in ours] == [text_of(each["tokens"].tolist()) for each in theirs]
    for segment, each in zip(ours, theirs, strict=True):
        assert segment.start == pytest.approx(float(each["start"]), abs=1e-6)
        assert segment.end == pytest.approx(float(each["end"]), abs=1e-6)


def test_the_recordings_of_these_tests_have_several_segments_in_a_window(tmp_path):
    """The comparison above would say little about pairs of timestamps if no text had them."""
    num_windows, num_segments = 0, 0
    for seed in range(6):
        make_folder(tmp_path / str(seed), seed)
        choices = Choices(language="fr", task="translate", timestamps=True, max_new_tokens=MAX_NEW)
        segments, _ = recording(tmp_path / str(seed), features_of(3.37, seed)).transcribe(choices)
        num_windows, num_segments = num_windows + 4, num_segments + len(segments)
    assert num_segments > 1.5 * num_windows


@pytest.mark.parametrize("seed", range(4))
def test_the_language_is_that_of_transformers(seed, tmp_path):
    model, features = make_folder(tmp_path, seed), features_of(0.8, seed)
    expected = model.detect_language(features[None]).item()
    _, language = recording(tmp_path, features).transcribe(Choices(max_new_tokens=3))
    assert model.generation_config.lang_to_id[f"<|{language}|>"] == expected


def test_a_saved_folder_transcribes_alike_in_transformers(tmp_path):
    import transformers

    make_folder(tmp_path / "theirs")
    features = features_of(3.37)
    clearhead.load(tmp_path / "theirs", fast=False).save(tmp_path / "ours", format="huggingface")
    texts = []
    for name in ("theirs", "ours"):
        model = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / name).eval()
        with torch.no_grad():
            texts.append(model.generate(features[None], language="en", task="transcribe", return_timestamps=True))
    assert torch.equal(texts[0], texts[1])

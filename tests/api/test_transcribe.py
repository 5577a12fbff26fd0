"""model.transcribe: folders of every format, samples and files, and what a speech model refuses."""

import json
import warnings

import pytest

import clearhead
from clearhead.api import save_gguf, save_onnx
from clearhead.checkpoint import SpeechSettings
from clearhead.errors import ClearheadError
from clearhead.parallel.process_group import divide_network
from clearhead.server.service import Service
from tests.audio.files import write_wav
from tests.transcription.toys import BANDS, END, TOKENS, make_folder, make_tokenizer, warble

OPTIONS = {"language": "de", "max_new_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speech")
    make_folder(folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no rule of generation_config.json is reported as unused
        return clearhead.load(folder, fast=False)


def test_the_text_is_that_of_the_tokens(model):
    result = model.transcribe(warble(0.7), **OPTIONS)
    text = make_tokenizer().decode([token for token in result.tokens if token < END], skip_special_tokens=True)
    assert str(result) == result.text == text.strip()
    assert result.duration == 0.7
    assert result.language == "de"


def test_files_arrays_and_sampling_rates_are_equal(model, tmp_path):
    write_wav(tmp_path / "a.wav", warble(1.3))
    assert model.transcribe(tmp_path / "a.wav", **OPTIONS).tokens == model.transcribe(warble(1.3), **OPTIONS).tokens
    assert model.transcribe(str(tmp_path / "a.wav"), **OPTIONS) == model.transcribe(tmp_path / "a.wav", **OPTIONS)
    fine = model.transcribe(warble(1.3, rate=48_000).numpy(), sampling_rate=48_000, **OPTIONS)
    assert fine.duration == 1.3


def test_times_end_with_the_recording(model):
    result = model.transcribe(warble(2.5), timestamps=True, max_new_tokens=12)
    assert len(result.segments) >= 3
    assert all(0 <= part.start <= part.end <= result.duration for part in result.segments)
    assert [part.start for part in result.segments] == sorted(part.start for part in result.segments)


@pytest.mark.parametrize("format", ["native", "huggingface"])
def test_saved_models_transcribe_alike(model, format, tmp_path):
    model.save(tmp_path, format=format)
    loaded = clearhead.load(tmp_path, fast=False)
    assert loaded.speech == model.speech
    assert loaded.transcribe(warble(2.1), **OPTIONS) == model.transcribe(warble(2.1), **OPTIONS)


def test_a_module_of_transformers_and_back(model):
    module = model.to_huggingface()
    back = clearhead.from_huggingface(module, model.tokenizer, fast=False)
    assert back.speech == model.speech
    assert back.transcribe(warble(0.7), **OPTIONS) == model.transcribe(warble(0.7), **OPTIONS)


def test_the_kernels_and_packed_weights_transcribe(folder, model):
    expected = model.transcribe(warble(1.6), beams=2, **OPTIONS)
    assert clearhead.load(folder).transcribe(warble(1.6), beams=2, **OPTIONS) == expected
    assert len(clearhead.load(folder, weights="int8").transcribe(warble(1.6), **OPTIONS).tokens) > 0


def test_without_generation_config_the_tokenizer_says_what_tokens_mean(folder, model, tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    loaded = clearhead.load(tmp_path, fast=False)
    assert loaded.speech is None
    assert loaded.transcribe(warble(0.7), **OPTIONS).language == "de"
    assert loaded.transcribe(warble(0.7), max_new_tokens=1).language == (
        model.transcribe(warble(0.7), max_new_tokens=1).language
    )


def test_english_only_models_have_no_language(tmp_path):
    make_folder(tmp_path, is_multilingual=False, lang_to_id={}, task_to_id={}, suppress_tokens=[-1])
    model = clearhead.load(tmp_path, fast=False)
    assert model.transcribe(warble(0.7), max_new_tokens=4).language is None
    assert model.transcribe(warble(0.7), max_new_tokens=4, language="en").text is not None
    with pytest.raises(ClearheadError, match="knows English only, not 'de'"):
        model.transcribe(warble(0.7), language="de")
    with pytest.raises(ClearheadError, match="cannot translate"):
        model.transcribe(warble(0.7), task="translate")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"language": "xx"}, "unknown language 'xx'; available: de, en, fr"),
        ({"task": "sing"}, "unknown task 'sing'"),
        ({"beams": 0}, "beams is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_wrong_options_are_refused(model, options, message):
    with pytest.raises(ClearheadError, match=message):
        model.transcribe(warble(0.7), **options)


def test_models_of_text_do_not_transcribe():
    with pytest.raises(ClearheadError, match="reads text, not audio"):
        clearhead.create("gpt2", tiny=True).transcribe(warble(0.1))
    with pytest.raises(ClearheadError, match="no tokenizer"):
        clearhead.create("whisper-tiny", tiny=True).transcribe(warble(0.1))


REFUSED = {
    "generate": lambda model, folder: model.generate("Hello"),
    "generate_many": lambda model, folder: model.generate_many(["Hello", "you"]),
    "stream": lambda model, folder: list(model.stream("Hello")),
    "embed": lambda model, folder: model.embed("Hello"),
    "trace": lambda model, folder: model.trace("Hello", "you"),
    "export": lambda model, folder: model.export(),
    "onnx": lambda model, folder: save_onnx(model, folder / "a.onnx"),
    "parallel": lambda model, folder: divide_network(model.network, None),
    "serve": lambda model, folder: Service(model, ("a",), None, None, None),
    "verify": lambda model, folder: __import__("clearhead.verification").verification.verify(model),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_text_refuses_a_speech_model(name, model, tmp_path):
    with pytest.raises(ClearheadError, match="audio"):
        REFUSED[name](model, tmp_path)


def test_gguf_is_refused(model, tmp_path):
    with pytest.raises(ClearheadError, match="no GGUF architecture"):
        save_gguf(model, tmp_path / "a.gguf")


def change(folder, file, **values):
    data = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(data | values))


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("generation_config.json", {"no_timestamps_token_id": 10**6}, "names token 1000000"),
        ("generation_config.json", {"lang_to_id": {"<|en|>": "a"}}, "whole number"),
        ("generation_config.json", {"begin_suppress_tokens": ["a"]}, "begin_suppress_tokens"),
        ("generation_config.json", {"decoder_start_token_id": None}, "decoder_start_token_id"),
        ("preprocessor_config.json", {"hop_length": 320}, "hop_length"),
        ("preprocessor_config.json", {"feature_size": BANDS + 1}, "feature_size"),
        ("preprocessor_config.json", {"dither": 0.1}, "dither"),
    ],
)
def test_damaged_settings_are_refused(file, values, message, tmp_path):
    make_folder(tmp_path)
    change(tmp_path, file, **values)
    with pytest.raises(ClearheadError, match=message):
        clearhead.load(tmp_path, fast=False)


def test_the_settings_are_those_of_the_folder(model):
    speech = model.speech
    assert isinstance(speech, SpeechSettings)
    assert speech.languages == {code: TOKENS[f"<|{code}|>"] for code in ("en", "de", "fr")}
    assert speech.suppressed_first == (32, END)

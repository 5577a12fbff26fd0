"""Pipes, devices, huge numbers and huge JSON beside a model: each is rejected at once, with little memory."""

import json
import os
import time
from contextlib import suppress

import pytest

import clearhead
from clearhead.api import Model
from clearhead.checkpoint.native import DESCRIPTION_FILE, save_native
from clearhead.checkpoint.recurrent import load_recurrent
from clearhead.errors import ClearheadError
from clearhead.model import RecurrentConfig, RecurrentTranslator
from clearhead.tokenization.characters import byte_tokenizer
from tests.checkpoint.tiny import same_network, tiny_network

FILES = {
    "huggingface": ["config.json", "model.safetensors", "tokenizer_config.json", "generation_config.json"],
    "native": ["clearhead.json", "weights.safetensors", "tokenizer.json", "special_tokens_map.json"],
}


@pytest.mark.parametrize(("format", "name"), [(format, name) for format, names in FILES.items() for name in names])
@pytest.mark.parametrize("special", ["pipe", "device"])
def test_a_pipe_or_device_in_place_of_a_file_is_not_opened(tmp_path, format, name, special):
    Model(tiny_network(vocab_size=256), byte_tokenizer()).save(tmp_path, format)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if special == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    started = time.perf_counter()
    if name in ("tokenizer.json", "config.json", "clearhead.json"):  # the file that says what is there
        with suppress(ClearheadError):
            clearhead.load(tmp_path, fast=False)
    else:
        with pytest.raises(ClearheadError, match=f"{name} is not a regular file but a {special}; replace it by a file"):
            clearhead.load(tmp_path, fast=False)
    assert time.perf_counter() - started < 5


def test_a_config_of_many_megabytes_is_rejected_before_it_is_parsed(tmp_path):
    Model(tiny_network()).save(tmp_path, "huggingface")
    (tmp_path / "config.json").write_text("[" + "0," * (1 << 23) + "0]")
    with pytest.raises(ClearheadError, match=r"config\.json has 16777219 bytes; at most 4194304 can be read"):
        clearhead.load(tmp_path)


def test_an_unpaired_surrogate_in_a_json_file_is_rejected(tmp_path):
    Model(tiny_network(vocab_size=256), byte_tokenizer()).save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": "\ud800"}))
    with pytest.raises(ClearheadError, match=r"tokenizer_config\.json has an unpaired surrogate"):
        clearhead.load(tmp_path)
    path.write_text(json.dumps({"chat_template": "\U0001f600"}))  # written as a pair
    assert clearhead.load(tmp_path).tokenizer


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 300, "a/" * 3000, "é" * 200])
def test_a_text_that_is_too_long_for_a_path_is_rejected(name):
    with pytest.raises(ClearheadError, match=r"characters, too many for a path or the name of a model"):
        clearhead.load(name)
    with pytest.raises(ClearheadError, match=r"characters, too many for a path or the name of a model"):
        Model(tiny_network()).save(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 10**9}, "too few for the 1000000000 layers"),
        ({"width": 10**9, "embedding_width": 10**9}, "a model of these sizes cannot be created"),
    ],
)
def test_a_recurrent_network_of_impossible_size_is_rejected_at_once(tmp_path, change, message):
    config = RecurrentConfig(
        source_vocab_size=8, target_vocab_size=8, embedding_width=4, width=4, cell="gru", attention="none", context=8
    )
    save_native(RecurrentTranslator(config), tmp_path)
    description = json.loads((tmp_path / DESCRIPTION_FILE).read_text())
    description["model"] |= change
    (tmp_path / DESCRIPTION_FILE).write_text(json.dumps(description))
    with pytest.raises(ClearheadError, match=message):
        load_recurrent(tmp_path)


@pytest.mark.parametrize("format", ["native", "huggingface"])
def test_a_file_that_is_cut_short_after_loading_does_not_affect_the_model(tmp_path, format):
    """Mapped weights would kill the process with SIGBUS."""
    Model(tiny_network(width=64)).save(tmp_path, format)
    model = clearhead.load(tmp_path, fast=False)
    for path in tmp_path.glob("*.safetensors"):
        os.truncate(path, 100)
    assert same_network(model.network, tiny_network(width=64))


def test_a_file_that_is_cut_short_while_loading_is_reported(tmp_path):
    Model(tiny_network(width=64)).save(tmp_path)

    def cut(name, num_done, num_total):
        os.truncate(tmp_path / "weights.safetensors", 9000)

    with pytest.raises(ClearheadError, match="the file has become shorter since its header was read"):
        clearhead.load(tmp_path, progress=cut)

"""Recognizing formats and resolving names: what is read and fetched, and the errors if nothing is found."""

import json
import shutil

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError

from clearhead.api import Model
from clearhead.checkpoint.formats import FORMATS, format_of, open_model, read_config
from clearhead.checkpoint.huggingface import INDEX_FILE, WEIGHTS_FILE, save_folder
from clearhead.checkpoint.interface import DEFAULT_OPTIONS
from clearhead.checkpoint.native import save_native
from clearhead.errors import ClearheadError
from clearhead.tokenization.characters import byte_tokenizer
from tests.checkpoint.test_gguf_model import write_file
from tests.checkpoint.test_llama2c import checkpoint_bytes
from tests.checkpoint.tiny import same_network, tiny_config, tiny_network

BERT = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)


def write_model(kind, folder):
    """Write a tiny model in one of the formats; return the path to load it from."""
    match kind:
        case "huggingface":
            save_folder(tiny_network(), folder)
        case "native":
            save_native(tiny_network(), folder)
        case "gguf":
            folder.mkdir()
            return write_file(folder / "model.gguf", "llama")
        case "llama2c":
            folder.mkdir()
            (folder / "model.bin").write_bytes(checkpoint_bytes(torch.Generator().manual_seed(0))[0])
            return folder / "model.bin"
    return folder


@pytest.mark.parametrize("kind", ["huggingface", "native", "gguf", "llama2c"])
def test_read_config_equals_the_config_of_the_loaded_model(tmp_path, kind):
    path = write_model(kind, tmp_path / "model")
    assert [format.matches(path) for format in FORMATS].count(True) == 1
    assert read_config(path) == format_of(path).load(path, DEFAULT_OPTIONS).network.config


def test_the_extension_of_a_file_may_be_upper_case(tmp_path):
    path = write_model("gguf", tmp_path / "model").rename(tmp_path / "MODEL.GGUF")
    assert read_config(path).decoder


def test_a_folder_with_only_a_config_can_be_shown_but_not_loaded(tmp_path):
    save_folder(tiny_network(), tmp_path)
    (tmp_path / WEIGHTS_FILE).unlink()
    assert read_config(tmp_path) == tiny_config()
    with pytest.raises(ClearheadError, match=r"has no model\.safetensors"):
        open_model(tmp_path)


def test_read_config_takes_tensor_names_from_the_index(tmp_path):
    """A BERT with a pooler and without a head, of which only the index has been fetched."""
    model = transformers.BertModel(BERT)
    model.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert config.pooler
    (tmp_path / WEIGHTS_FILE).unlink()
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(model.state_dict(), "a.safetensors")}))
    assert read_config(tmp_path) == config
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": "../a.safetensors"}}))
    with pytest.raises(ClearheadError, match="only name safetensors files in its own folder"):
        read_config(tmp_path)


def test_only_the_files_that_are_read_are_fetched_from_the_hub(tmp_path, monkeypatch):
    save_folder(tiny_network(), tmp_path / "hub")
    for copy in ("consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin", "model.py"):
        (tmp_path / "hub" / copy).parent.mkdir(exist_ok=True)
        (tmp_path / "hub" / copy).touch()
    fetched = []

    def fetch(hub_id, **patterns):
        names = [str(path.relative_to(tmp_path / "hub")) for path in (tmp_path / "hub").rglob("*.*")]
        fetched.append(sorted(huggingface_hub.utils.filter_repo_objects(names, **patterns)))
        cache = tmp_path / f"cache{len(fetched)}"
        cache.mkdir()
        for name in fetched[-1]:
            shutil.copy(tmp_path / "hub" / name, cache)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert read_config("someone/model") == tiny_config()
    assert same_network(open_model("someone/model").network, tiny_network())
    assert fetched == [["config.json"], ["config.json", "model.safetensors"]]


def test_a_path_that_does_not_exist_and_is_not_on_the_hub(monkeypatch):
    def offline(hub_id, **patterns):
        raise LocalEntryNotFoundError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ClearheadError, match=r"^models/lama does not exist here and could not .*\(no network\)"):
        open_model("models/lama")


def test_the_error_for_a_training_run_names_its_model_folder(tmp_path):
    save_native(tiny_network(), tmp_path / "model")
    with pytest.raises(ClearheadError, match=r"is the folder of a training run; its model is .*model$"):
        format_of(tmp_path)


def test_a_home_folder_of_an_unknown_user():
    with pytest.raises(ClearheadError, match="unknown model '~no-such-user'"):
        open_model("~no-such-user")


def test_a_missing_gguf_file_is_not_requested_from_the_hub():
    with pytest.raises(ClearheadError, match=r"^models/lama\.gguf does not exist; check the path$"):
        open_model("models/lama.gguf")


def test_names_of_models_ignore_case(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_HOME", str(tmp_path))
    with pytest.raises(ClearheadError, match="SmolLM2 is not installed yet; fetch it with"):
        open_model("SmolLM2")


def test_a_model_without_tokenizer_is_not_saved_beside_a_tokenizer(tmp_path):
    """It would be loaded with that tokenizer."""
    Model(tiny_network(), byte_tokenizer()).save(tmp_path)
    before = (tmp_path / "weights.safetensors").read_bytes()
    with pytest.raises(ClearheadError, match="contains a tokenizer, but this model has none"):
        Model(tiny_network(seed=1)).save(tmp_path)
    assert (tmp_path / "weights.safetensors").read_bytes() == before
    Model(tiny_network(seed=1), byte_tokenizer()).save(tmp_path)


def test_a_model_of_another_format_is_not_overwritten(tmp_path):
    """A CTranslate2 folder also has a config.json, and would still be loaded from its model.bin."""
    (tmp_path / "model.bin").write_bytes(b"\6\0\0\0\x10\0TransformerSpec\0")
    (tmp_path / "config.json").write_text("{}")
    for kind in ("native", "huggingface"):
        with pytest.raises(ClearheadError, match="contains a model in another format"):
            Model(tiny_network()).save(tmp_path, kind)
    assert (tmp_path / "config.json").read_text() == "{}"

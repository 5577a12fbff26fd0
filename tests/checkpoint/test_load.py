"""One door for all formats: what is read without weights, what is fetched, and what is said where nothing is found."""

import json
import shutil

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError

from clearhead.api import Model
from clearhead.checkpoint.huggingface import INDEX, WEIGHTS, save_folder
from clearhead.checkpoint.load import FORMATS, format_of, open_model, read_config
from clearhead.checkpoint.native import save_native
from clearhead.errors import ClearheadError
from clearhead.tokenization.characters import byte_tokenizer
from tests.checkpoint.test_gguf_model import write_file
from tests.checkpoint.test_llama2c import checkpoint_bytes
from tests.checkpoint.tiny import same_network, tiny_config, tiny_network

BERT = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)


def written(kind, folder):
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
def test_the_config_is_that_of_the_loaded_model(tmp_path, kind):
    path = written(kind, tmp_path / "model")
    assert [kept.holds(path) for kept in FORMATS].count(True) == 1
    assert read_config(path) == format_of(path).load(path, None, None, None).network.config


def test_the_ending_of_a_file_may_be_written_in_capitals(tmp_path):
    path = written("gguf", tmp_path / "model").rename(tmp_path / "MODEL.GGUF")
    assert read_config(path).decoder


def test_a_folder_with_only_its_config_is_shown_but_not_loaded(tmp_path):
    save_folder(tiny_network(), tmp_path)
    (tmp_path / WEIGHTS).unlink()
    assert read_config(tmp_path) == tiny_config()
    with pytest.raises(ClearheadError, match=r"has no model\.safetensors"):
        open_model(tmp_path)


def test_the_index_tells_which_tensors_there_are(tmp_path):
    """A BERT with a pooler and no head, of which only the index has arrived."""
    model = transformers.BertModel(BERT)
    model.save_pretrained(tmp_path)
    whole = read_config(tmp_path)
    assert whole.pooler
    (tmp_path / WEIGHTS).unlink()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(model.state_dict(), "a.safetensors")}))
    assert read_config(tmp_path) == whole
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "../a.safetensors"}}))
    with pytest.raises(ClearheadError, match="only safetensors files beside it"):
        read_config(tmp_path)


def test_of_a_hub_model_only_what_is_read_is_fetched(tmp_path, monkeypatch):
    save_folder(tiny_network(), tmp_path / "there")
    for copy in ("consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin", "model.py"):
        (tmp_path / "there" / copy).parent.mkdir(exist_ok=True)
        (tmp_path / "there" / copy).touch()
    fetched = []

    def fetch(hub_id, **patterns):
        names = [str(path.relative_to(tmp_path / "there")) for path in (tmp_path / "there").rglob("*.*")]
        fetched.append(sorted(huggingface_hub.utils.filter_repo_objects(names, **patterns)))
        here = tmp_path / f"here{len(fetched)}"
        here.mkdir()
        for name in fetched[-1]:
            shutil.copy(tmp_path / "there" / name, here)
        return str(here)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert read_config("someone/model") == tiny_config()
    assert same_network(open_model("someone/model").network, tiny_network())
    assert fetched == [["config.json"], ["config.json", "model.safetensors"]]


def test_a_mistyped_path_is_called_a_path(monkeypatch):
    def offline(hub_id, **patterns):
        raise LocalEntryNotFoundError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ClearheadError, match=r"^models/lama is no path here, and could not .*\(no network\)"):
        open_model("models/lama")


def test_the_folder_of_a_run_names_its_model(tmp_path):
    save_native(tiny_network(), tmp_path / "model")
    with pytest.raises(ClearheadError, match=r"is the folder of a training run; its model is .*model$"):
        format_of(tmp_path)


def test_the_folder_of_nobody_is_no_traceback():
    with pytest.raises(ClearheadError, match="unknown model '~no-such-user'"):
        open_model("~no-such-user")


def test_a_missing_file_is_not_looked_for_on_the_hub():
    with pytest.raises(ClearheadError, match=r"^models/lama\.gguf does not exist$"):
        open_model("models/lama.gguf")


def test_names_may_be_written_in_capitals(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_HOME", str(tmp_path))
    with pytest.raises(ClearheadError, match="SmolLM2 is not on this machine yet; fetch it with"):
        open_model("SmolLM2")


def test_a_model_without_tokenizer_is_not_saved_beside_another_ones(tmp_path):
    """It would be loaded with it."""
    Model(tiny_network(), byte_tokenizer()).save(tmp_path)
    kept = (tmp_path / "weights.safetensors").read_bytes()
    with pytest.raises(ClearheadError, match="holds a tokenizer, which this model has not"):
        Model(tiny_network(seed=1)).save(tmp_path)
    assert (tmp_path / "weights.safetensors").read_bytes() == kept
    Model(tiny_network(seed=1), byte_tokenizer()).save(tmp_path)


def test_a_model_of_another_format_is_not_written_over(tmp_path):
    """CTranslate2's folders have a config.json too, and would be loaded from model.bin."""
    (tmp_path / "model.bin").write_bytes(b"\6\0\0\0\x10\0TransformerSpec\0")
    (tmp_path / "config.json").write_text("{}")
    for kind in ("native", "huggingface"):
        with pytest.raises(ClearheadError, match="holds a model in another format"):
            Model(tiny_network()).save(tmp_path, kind)
    assert (tmp_path / "config.json").read_text() == "{}"

"""Clearhead's own folders: saving, loading, and errors for invalid ones."""

import json

import pytest
from safetensors.torch import load_file, save_file

from clearhead.checkpoint.native import DESCRIPTION_FILE, WEIGHTS_FILE, load_native, save_native
from clearhead.errors import ClearheadError
from tests.checkpoint.tiny import same_network, tiny_network


def test_loading_a_saved_network_restores_it(tmp_path):
    save_native(tiny_network(), tmp_path, "llama", {"eos_token_id": 2})
    loaded = load_native(tmp_path)
    assert same_network(loaded.network, tiny_network())
    assert loaded.family.name == "llama"
    assert loaded.special_ids == {"eos_token_id": 2}


def test_the_error_names_a_missing_tensor(tmp_path):
    save_native(tiny_network(), tmp_path)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    del tensors["decoder.final_norm.weight"]
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    with pytest.raises(ClearheadError, match=r"lacks the tensor decoder\.final_norm\.weight"):
        load_native(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format=2), "has format 2; this version of Clearhead reads format 1"),
        (lambda d: d.pop("format"), "has no 'format'"),
        (lambda d: d["model"].update(widht=3), "unknown key in model: 'widht'; did you mean 'width'"),
        (lambda d: d.update(model=None), "model must be a table"),
        (lambda d: d["model"]["decoder"]["layers"][0].update(times=10**9), "times is 1000000000"),
        (lambda d: d["model"].update(width=17), "the config needs"),
        (
            lambda d: d["model"]["decoder"]["layers"][0]["attention"].update(num_heads=2**62),
            "must be at most 1000000000",
        ),
        (lambda d: d["model"].update(context=2**62), "must be at most 1000000000"),
    ],
)
def test_an_invalid_description_is_rejected(tmp_path, change, message):
    save_native(tiny_network(), tmp_path)
    description = json.loads((tmp_path / DESCRIPTION_FILE).read_text())
    change(description)
    (tmp_path / DESCRIPTION_FILE).write_text(json.dumps(description))
    with pytest.raises(ClearheadError, match=message):
        load_native(tmp_path)

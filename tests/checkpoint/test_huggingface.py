"""Hugging Face folders: complete, sharded, damaged and malicious ones."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from clearhead.checkpoint.huggingface import load_folder, save_folder
from clearhead.checkpoint.interface import LoadOptions
from clearhead.checkpoint.tensors import dequantize_float8
from clearhead.errors import ClearheadError
from tests.checkpoint.tiny import same_network, tiny_network


@pytest.fixture
def folder(tmp_path):
    save_folder(tiny_network(), tmp_path / "model")
    return tmp_path / "model"


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_loading_a_saved_network_restores_it(folder):
    assert same_network(load_folder(folder).network, tiny_network())


def test_a_sharded_checkpoint_restores_the_network(tmp_path):
    network = tiny_network(tied=False)
    save_folder(network, tmp_path, shard_bytes=3000)
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0].startswith("model-00001-of-")
    assert same_network(load_folder(tmp_path).network, network)


def test_saving_one_file_over_shards_removes_the_index(tmp_path):
    save_folder(tiny_network(seed=1), tmp_path, shard_bytes=3000)
    save_folder(tiny_network(seed=2), tmp_path)
    assert same_network(load_folder(tmp_path).network, tiny_network(seed=2))


def test_weights_are_converted_to_the_chosen_dtype(folder):
    network = load_folder(folder, LoadOptions(dtype=torch.bfloat16)).network
    assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}


def test_tied_weights_are_stored_once(folder):
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    network = load_folder(folder).network
    assert network.head.weight is None


def test_a_duplicate_of_the_tied_table_must_be_equal(folder):
    edit_weights(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_folder(folder)
    edit_weights(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ClearheadError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_folder(folder)


def test_progress_counts_every_tensor(folder):
    reports = []
    load_folder(folder, LoadOptions(progress=lambda name, done, total: reports.append((done, total))))
    assert reports == [(number, len(reports)) for number in range(1, len(reports) + 1)]


def test_the_error_mentions_quantized_weights(folder):
    edit_config(folder, quantization_config={"quant_method": "hqq", "bits": 4})
    load_folder(folder)
    edit_weights(folder, lambda t: t.update({n + "x": t.pop(n) for n in list(t) if "_proj" in n}))
    with pytest.raises(
        ClearheadError, match=r"lacks 14 tensors.* quantized \(hqq\), which is not supported: .* or a \.gguf file"
    ):
        load_folder(folder)


def test_names_without_the_base_model_prefix(folder):
    """Checkpoints of the bare model lack `model.`."""
    edit_weights(folder, lambda t: [t.update({n.removeprefix("model."): t.pop(n)}) for n in list(t)])
    assert same_network(load_folder(folder).network, tiny_network())


# --- damaged


def test_the_error_names_a_missing_tensor(folder):
    edit_weights(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ClearheadError, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load_folder(folder)


def test_the_error_names_an_unexpected_tensor(folder):
    edit_weights(folder, lambda t: t.update({"model.layers.7.mlp.up_proj.weight": torch.ones(2, 2)}))
    with pytest.raises(ClearheadError, match=r"holds the tensor model\.layers\.7\.mlp\.up_proj\.weight"):
        load_folder(folder)


def test_the_error_for_a_wrong_shape_gives_both_shapes(folder):
    edit_weights(folder, lambda t: t.update({"model.norm.weight": torch.ones(17)}))
    with pytest.raises(ClearheadError, match=r"model\.norm\.weight has shape \(17,\); the config needs \(16,\)"):
        load_folder(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_error_names_weights_that_are_not_finite(folder, value):
    def damage(tensors):
        tensors["model.layers.0.self_attn.q_proj.weight"][3, 2] = value

    edit_weights(folder, damage)
    with pytest.raises(ClearheadError, match=r"q_proj\.weight holds NaN or infinite numbers"):
        load_folder(folder)


def test_the_error_names_weights_that_overflow_the_chosen_dtype(folder):
    """Converted to infinity, they would make every logit NaN."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] = 1e5
    save_file(tensors, folder / "model.safetensors")
    for dtype in (None, torch.float32, torch.bfloat16, torch.float64):
        assert (
            load_folder(folder, LoadOptions(dtype=dtype))
            .network.decoder.layers[0]
            .attention.query.weight.isfinite()
            .all()
        )
    with pytest.raises(
        ClearheadError, match=r"q_proj\.weight holds numbers from .* to 100000, too large for torch\.float16"
    ):
        load_folder(folder, LoadOptions(dtype=torch.float16))


def test_integer_weights_are_rejected(folder):
    edit_weights(folder, lambda t: t.update({"model.norm.weight": torch.ones(16, dtype=torch.int64)}))
    with pytest.raises(ClearheadError, match=r"model\.norm\.weight holds torch\.int64"):
        load_folder(folder)


def test_a_truncated_file_is_rejected(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ClearheadError, match="is not a complete safetensors file"):
        load_folder(folder)


def test_a_pickle_file_is_rejected_without_opening_it(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with pytest.raises(ClearheadError, match=r"pytorch_model\.bin, a pickle file, which is never opened"):
        load_folder(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..safetensors", "x.bin"])
def test_a_shard_outside_the_folder_is_rejected(folder, name):
    index = {"metadata": {}, "weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ClearheadError, match=r"only name safetensors files in its own folder|lacks"):
        load_folder(folder)


def test_a_shard_with_an_endless_name_is_rejected(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors" * 100}}))
    with pytest.raises(ClearheadError, match="has 1700 characters, too many for a path"):
        load_folder(folder)


def test_the_error_names_a_missing_shard(folder):
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ClearheadError, match="lacks model-00001-of-00002"):
        load_folder(folder)


def test_a_tensor_in_two_shards_is_rejected(folder):
    (folder / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    index = {"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ClearheadError, match="is in two files"):
        load_folder(folder)


# --- config.json


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llamma"}, "models of type 'llamma' are not supported; docs/models.md lists"),
        ({"hidden_size": "wide"}, "'hidden_size' must be a whole number, not 'wide'"),
        ({"hidden_size": -1}, "'hidden_size' is -1"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"num_hidden_layers": 10**8}, "'num_hidden_layers' is 100000000"),
        ({"num_hidden_layers": 999}, "holds 20 tensors, too few for the 999 layers of the config"),
        ({"num_key_value_heads": 3}, "num_heads is 4; it must be a multiple of num_kv_heads 3"),
        ({"num_key_value_heads": 0}, "num_kv_heads is 0"),
        ({"head_dim": 0}, "head_width is 0"),
        ({"head_dim": 0, "num_attention_heads": 0}, "'num_attention_heads' is 0; it must be from 1"),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "'longrope' needs the lists of numbers short_factor and long_factor",
        ),
        ({"rope_parameters": [1]}, "'rope_parameters' must be an object"),
        ({"hidden_act": "gelou"}, "unknown activation in .* 'gelou'; did you mean 'gelu'"),
        ({"vocab_size": 30}, r"embed_tokens.weight has shape \(31, 16\); the config needs \(30, 16\)"),
        ({"eos_token_id": "end"}, "'eos_token_id' must be a token id"),
        ({"decoder_start_token_id": [1, 2]}, r"'decoder_start_token_id' must be a token id, not \[1, 2\]"),
        ({"vocab_size": 10**9, "hidden_size": 10**9, "intermediate_size": 10**9}, r"\(31, 16\); the config needs"),
        (
            {"num_attention_heads": 10**9, "num_key_value_heads": 10**9, "head_dim": 10**9, "hidden_size": 10**9},
            "a model of these sizes cannot be created",
        ),
    ],
)
def test_the_error_for_an_invalid_config_is_one_line(folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(ClearheadError, match=message) as caught:
        load_folder(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a":' * 100_000, '"x"', "nul"])
def test_a_config_that_is_not_a_json_object(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ClearheadError, match=r"not valid JSON|must hold a JSON object"):
        load_folder(folder)


def test_saving_a_config_that_no_family_can_express(tmp_path):
    from dataclasses import replace

    from clearhead.architecture import Head
    from clearhead.model.transformer import Transformer

    config = replace(tiny_network().config, head=Head(tied=True, softcap=3.0, bias=True, scale=0.3))
    with pytest.raises(ClearheadError, match="save it as native instead"):
        save_folder(Transformer(config), tmp_path)


def test_float8_blocks_are_multiplied_by_their_scales():
    torch.manual_seed(0)
    scale = torch.rand(2, 3)
    stored = torch.randn(200, 300).to(torch.float8_e4m3fn)
    values = dequantize_float8(stored, scale)
    for row, column in ((0, 0), (127, 128), (128, 127), (199, 299)):
        expected = stored[row, column].float() * scale[row // 128, column // 128]
        assert values[row, column] == expected.to(torch.bfloat16)


def test_saving_shards_over_one_file_removes_it(tmp_path):
    """transformers prefers model.safetensors to an index."""
    save_folder(tiny_network(seed=1), tmp_path)
    save_folder(tiny_network(seed=2), tmp_path, shard_bytes=3000)
    assert not (tmp_path / "model.safetensors").exists()
    assert same_network(load_folder(tmp_path).network, tiny_network(seed=2))


def test_the_network_has_the_dtype_of_its_token_table(folder):
    """Norms are often stored in float32 beside bfloat16 matrices."""
    edit_weights(folder, lambda t: t.update({n: t[n].bfloat16() for n in t if t[n].ndim == 2}))
    network = load_folder(folder).network
    assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}
    network(torch.tensor([[1, 2]]))


def test_float8_needs_its_scales(folder):
    name = "model.layers.0.mlp.up_proj.weight"
    edit_weights(folder, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(ClearheadError, match="without scales"):
        load_folder(folder)
    edit_weights(folder, lambda t: t.update({f"{name}_scale_inv": torch.ones(2, 2)}))
    with pytest.raises(ClearheadError, match="cannot be read: its scales have shape"):
        load_folder(folder)
    edit_weights(folder, lambda t: t.update({f"{name}_scale_inv": torch.ones(1, 1)}))
    load_folder(folder)
    edit_weights(folder, lambda t: t.update({name: t[name][None]}))
    with pytest.raises(ClearheadError, match=r"only matrices can have .* not tensors of 3 dimensions"):
        load_folder(folder)


def test_a_token_id_of_minus_one_means_none(folder):
    for ids in ([2, 3], [2, None, -1, 3]):
        edit_config(folder, pad_token_id=-1, eos_token_id=ids)
        assert load_folder(folder).special_ids == {"eos_token_id": [2, 3]}


def test_a_number_too_large_for_a_float_is_rejected(folder):
    edit_config(folder, rms_norm_eps=10**400)
    with pytest.raises(ClearheadError, match=r"'rms_norm_eps' is 10+…; it must be finite and fit in a 64-bit float"):
        load_folder(folder)


def test_a_loaded_network_is_in_evaluation_mode(folder):
    assert not any(part.training for part in load_folder(folder).network.modules())


def test_a_tensor_in_both_old_and_new_spelling_is_rejected(tmp_path):
    """Older BERT checkpoints call the weight of a norm gamma."""
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    transformers.BertModel(config).save_pretrained(tmp_path)
    name = "embeddings.LayerNorm.weight"
    edit_weights(tmp_path, lambda t: t.update({"embeddings.LayerNorm.gamma": t.pop(name) + 1}))
    norm = load_folder(tmp_path).network.encoder.embedding.norm
    assert torch.equal(norm.weight, torch.full((8,), 2.0))
    edit_weights(tmp_path, lambda t: t.update({name: t["embeddings.LayerNorm.gamma"] - 1}))
    with pytest.raises(ClearheadError, match=r"holds the tensor .*embeddings\.LayerNorm\.gamma"):
        load_folder(tmp_path)


def test_special_ids_and_the_total_size_are_saved(tmp_path):
    save_folder(tiny_network(), tmp_path, special_ids={"eos_token_id": [2, 3]}, shard_bytes=3000)
    assert load_folder(tmp_path).special_ids == {"eos_token_id": [2, 3]}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    num_values = sum(parameter.numel() for parameter in tiny_network().parameters())
    assert index["metadata"]["total_size"] == 4 * num_values


def test_a_token_id_that_is_too_large_is_rejected(folder):
    edit_config(folder, eos_token_id=10**10)
    with pytest.raises(ClearheadError, match="'eos_token_id' must be a token id"):
        load_folder(folder)


# --- generation_config.json


def generate_with_transformers(folder):
    """Return the tokens that transformers generates with a model that always predicts token 7."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    return model.generate(torch.tensor([[3]]), max_new_tokens=3, do_sample=False)[0, 1:].tolist()


def test_ids_of_generation_config_override_those_of_config_and_are_saved(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    theirs = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        theirs.lm_head.weight[7] = 10 * theirs.model(torch.tensor([[3]])).last_hidden_state[0, 0]
    theirs.save_pretrained(tmp_path / "one_end")
    theirs.generation_config.eos_token_id = [2, 7]
    theirs.save_pretrained(tmp_path / "two_ends")
    assert len(generate_with_transformers(tmp_path / "one_end")) == 3
    assert generate_with_transformers(tmp_path / "two_ends") == [7]

    one, two = load_folder(tmp_path / "one_end"), load_folder(tmp_path / "two_ends")
    assert (one.special_ids["eos_token_id"], two.special_ids["eos_token_id"]) == (2, [2, 7])
    save_folder(two.network, tmp_path / "saved", two.family, two.special_ids)
    assert generate_with_transformers(tmp_path / "saved") == [7]
    save_folder(one.network, tmp_path / "two_ends", one.family, one.special_ids)
    assert len(generate_with_transformers(tmp_path / "two_ends")) == 3


def test_special_ids_of_a_model_with_a_text_config(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({"text_config": config | {"bos_token_id": 1, "eos_token_id": 2}, "eos_token_id": 3}))
    assert load_folder(folder).special_ids == {"bos_token_id": 1, "eos_token_id": 3}

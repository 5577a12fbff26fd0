"""Adapters in PEFT's folder format change a model as the PEFT library does, and are written as it reads them."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import clearhead
from clearhead.catalog import check_model_files
from clearhead.checkpoint import (
    Adapter,
    AdapterSet,
    merge_peft_adapter,
    open_model,
    read_config,
    read_peft_adapter,
    save_adapter,
    save_peft_adapter,
    to_peft,
)
from clearhead.errors import ClearheadError
from clearhead.tokenization import byte_tokenizer

RANK, ALPHA = 4, 6
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
KINDS = {"lora": {}, "rank-stabilized": {"use_rslora": True}, "dora": {"use_dora": True}}


@pytest.fixture(params=["llama", "gpt2"])
def base(request, tmp_path):
    """Return the folder of a small model."""
    torch.manual_seed(0)
    if request.param == "llama":
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=30, max_position_embeddings=64,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=30, n_positions=64)
        model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def modules_of(base):
    names = load_file(base / "model.safetensors")
    ends = ("q_proj.weight", "down_proj.weight", "c_attn.weight", "c_proj.weight")
    return {name.removesuffix(".weight"): tensor for name, tensor in names.items() if name.endswith(ends)}


def write_adapter(folder, base, seed=0, **settings):
    """Write an adapter as PEFT does; return its tensors."""
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    transposed = any("c_attn" in name for name in modules_of(base))
    for module, weight in modules_of(base).items():
        rows, columns = weight.shape[::-1] if transposed else weight.shape
        full = module if module.startswith(("model.", "transformer.")) else f"transformer.{module}"
        tensors[f"base_model.model.{full}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator)
        tensors[f"base_model.model.{full}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) / 10
        if settings.get("use_dora"):
            tensors[f"base_model.model.{full}.lora_magnitude_vector"] = torch.rand(rows, generator=generator) + 0.5
    config = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "task_type": "CAUSAL_LM",
        "fan_in_fan_out": transposed, "base_model_name_or_path": str(base), "lora_dropout": 0.1,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules_of(base)}),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


def expected_logits(base, *adapters):
    """Change the weights of transformers' model by the published formulas, with loops over rows."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    for tensors, settings in adapters:
        scale = ALPHA / (RANK**0.5 if settings.get("use_rslora") else RANK)
        for name, reduce in tensors.items():
            if not name.endswith("lora_A.weight"):
                continue
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            layer = model.get_submodule(module)
            transposed = isinstance(layer, transformers.pytorch_utils.Conv1D)
            weight = (layer.weight.T if transposed else layer.weight).detach().double()
            weight = weight + scale * tensors[name.replace("lora_A", "lora_B")].double() @ reduce.double()
            magnitude = tensors.get(name.replace("lora_A.weight", "lora_magnitude_vector"))
            if magnitude is not None:
                rows = [magnitude[row] * weight[row] / weight[row].square().sum().sqrt() for row in range(len(weight))]
                weight = torch.stack(rows)
            layer.weight.data = (weight.T if transposed else weight).float().contiguous()
    with torch.no_grad():
        return model(TOKENS).logits


def logits(network):
    with torch.no_grad():
        return network(TOKENS)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_merged_as_its_formula_says(base, tmp_path, kind):
    tensors = write_adapter(tmp_path / "adapter", base, **KINDS[kind])
    merged = clearhead.load(tmp_path / "adapter", fast=False)
    expected = expected_logits(base, (tensors, KINDS[kind]))
    assert (logits(merged.network) - expected).abs().max() <= 1e-5
    assert (logits(open_model(base).network) - expected).abs().max() > 1e-2


def test_adapters_are_switched_and_used_together(base, tmp_path):
    first = write_adapter(tmp_path / "first", base, seed=1)
    second = write_adapter(tmp_path / "second", base, seed=2, use_rslora=True)
    write_adapter(tmp_path / "third", base, seed=3, use_dora=True)
    parts = open_model(base)
    before = {name: tensor.clone() for name, tensor in parts.network.state_dict().items()}
    adapters = AdapterSet(parts.network, parts.family)
    for name in ("first", "second", "third"):
        adapters.add(name, tmp_path / name)
    adapters.use("first", "second")
    both = expected_logits(base, (first, {}), (second, {"use_rslora": True}))
    assert (logits(parts.network) - both).abs().max() <= 1e-5
    adapters.use("second")
    alone = expected_logits(base, (second, {"use_rslora": True}))
    assert (logits(parts.network) - alone).abs().max() <= 1e-5
    with pytest.raises(ClearheadError, match="DoRA rescales the whole weight"):
        adapters.use("first", "third")
    adapters.use()
    assert all(torch.equal(before[name], tensor) for name, tensor in parts.network.state_dict().items())
    with pytest.raises(ClearheadError, match="unknown adapter"):
        adapters.use("fourth")
    adapters.use("first")
    adapters.merge()
    adapters.use()
    assert (logits(parts.network) - expected_logits(base, (first, {}))).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_adapter_is_the_same(base, tmp_path, kind):
    tensors = write_adapter(tmp_path / "adapter", base, **KINDS[kind])
    save_peft_adapter(tmp_path / "again", read_peft_adapter(tmp_path / "adapter"))
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    one, other = (logits(clearhead.load(tmp_path / name, fast=False).network) for name in ("adapter", "again"))
    assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_peft_library_gives_the_same_logits(base, tmp_path, kind):
    peft = pytest.importorskip("peft")
    write_adapter(tmp_path / "adapter", base, **KINDS[kind])
    save_peft_adapter(tmp_path / "again", read_peft_adapter(tmp_path / "adapter"))
    parts = open_model(base)
    merge_peft_adapter(parts.network, parts.family, read_peft_adapter(tmp_path / "adapter"))
    for name in ("adapter", "again"):
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        model = peft.PeftModel.from_pretrained(model, tmp_path / name).eval()
        with torch.no_grad():
            assert (model(input_ids=TOKENS).logits - logits(parts.network)).abs().max() <= 1e-5


def test_our_own_adapter_becomes_one_of_peft(base, tmp_path):
    parts = open_model(base)
    own_name = "decoder.layers.1.attention.output"
    matrices = {own_name: (torch.randn(2, 32), torch.randn(32, 2))}
    if parts.family.name == "GPT-2" or "c_attn" in str(modules_of(base).keys()):
        with pytest.raises(ClearheadError, match=r"transformers stores .* in another form"):
            to_peft(Adapter(str(base), 0.5, matrices), parts.network, parts.family)
        return
    adapter = to_peft(Adapter(str(base), 0.5, matrices), parts.network, parts.family)
    assert list(adapter.changes) == ["model.layers.1.self_attn.o_proj"]
    save_peft_adapter(tmp_path / "adapter", adapter)
    before = parts.network.get_parameter(f"{own_name}.weight").detach().clone()
    merged = clearhead.load(tmp_path / "adapter", fast=False).network.get_parameter(f"{own_name}.weight")
    reduce, expand = matrices[own_name]
    assert torch.allclose(merged, before + 0.5 * expand @ reduce, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "'peft_type'"),
        ({"r": 0}, "'r'"),
        ({"r": 3}, "do not fit each other and the rank 3"),
        ({"bias": "all"}, "'bias'"),
        ({"rank_pattern": {"q_proj": 2}}, "'rank_pattern'"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save'"),
        ({"lora_alpha": "big"}, "'lora_alpha'"),
        ({"use_dora": True}, "use_dora"),
    ],
)
def test_adapters_that_are_not_supported_are_rejected(base, tmp_path, settings, message):
    write_adapter(tmp_path / "adapter", base)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(ClearheadError, match=message):
        read_peft_adapter(tmp_path / "adapter")


def test_an_adapter_of_another_model_is_rejected_without_a_change(base, tmp_path):
    tensors = write_adapter(tmp_path / "adapter", base)
    name = next(name for name in tensors if name.endswith("lora_A.weight"))
    save_file(tensors | {name: torch.ones(RANK, 7)}, tmp_path / "adapter" / "adapter_model.safetensors")
    parts = open_model(base)
    before = {key: tensor.clone() for key, tensor in parts.network.state_dict().items()}
    with pytest.raises(ClearheadError, match="belongs to another model"):
        merge_peft_adapter(parts.network, parts.family, read_peft_adapter(tmp_path / "adapter"))
    assert all(torch.equal(before[key], tensor) for key, tensor in parts.network.state_dict().items())
    save_file(tensors | {"base_model.model.x.bias": torch.ones(3)}, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ClearheadError, match="which is not a part of LoRA or DoRA"):
        read_peft_adapter(tmp_path / "adapter")


@pytest.mark.parametrize(
    "settings",
    [{"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}, {"use_qalora": True}, {"arrow_config": {"a": 1}}],
)
def test_kinds_of_lora_with_another_formula_are_rejected(base, tmp_path, settings):
    write_adapter(tmp_path / "adapter", base, **settings)
    with pytest.raises(ClearheadError, match=rf"'{next(iter(settings))}' is .*, which is not supported"):
        read_peft_adapter(tmp_path / "adapter")
    write_adapter(tmp_path / "gaussian", base, init_lora_weights="gaussian", use_qalora=False, arrow_config=None)
    assert read_peft_adapter(tmp_path / "gaussian").changes


def test_an_adapter_whose_base_is_missing_says_so(base, tmp_path):
    write_adapter(tmp_path / "adapter", base, base_model_name_or_path="no-such-model")
    with pytest.raises(
        ClearheadError, match="is an adapter, whose base model cannot be loaded: unknown model 'no-such"
    ):
        clearhead.load(tmp_path / "adapter")


def test_the_architecture_of_an_adapter_is_that_of_its_base(base, tmp_path):
    write_adapter(tmp_path / "adapter", base)
    assert read_config(tmp_path / "adapter") == read_config(base)
    save_adapter(
        tmp_path / "ours", Adapter(str(tmp_path / "adapter"), 1.0, {"x": (torch.ones(1, 2), torch.ones(2, 1))})
    )
    assert read_config(tmp_path / "ours") == read_config(base)
    check_model_files(tmp_path / "adapter")
    check_model_files(tmp_path / "ours")


def test_the_tokenizer_of_an_adapter_replaces_that_of_its_base(base, tmp_path):
    write_adapter(tmp_path / "adapter", base)
    assert clearhead.load(tmp_path / "adapter", fast=False).tokenizer is None
    byte_tokenizer().save(tmp_path / "adapter")
    assert clearhead.load(tmp_path / "adapter", fast=False).encode("a") == byte_tokenizer().encode("a")

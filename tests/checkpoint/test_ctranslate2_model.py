"""Marian models in CTranslate2 folders: small ones with weights from transformers, and a real one that translates."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel
from transformers import MarianTokenizer as TheirTokenizer

import clearhead
from clearhead.checkpoint.ctranslate2 import open_ctranslate2
from clearhead.checkpoint.ctranslate2_model import is_ctranslate2, load_ctranslate2
from clearhead.checkpoint.formats import open_model, read_config
from clearhead.checkpoint.interface import LoadOptions
from clearhead.errors import ClearheadError
from clearhead.families import family_of_type
from tests.checkpoint.test_ctranslate2 import marian_in_transformers, model_bytes
from tests.checkpoint.tiny import same_network

VOCAB, WIDTH, CONTEXT = 30, 16, 12  # the table in transformers has one more row, for the padding token
TOKENS = ["</s>", "<unk>", *(f"▁w{number}" for number in range(VOCAB - 2))]
ENCODINGS = "decoder/position_encodings/encodings"
NOT_SINES = "position_encodings/encodings is not the sinusoidal table of Marian models"
ACTIVATIONS = {0: "relu", 1: "gelu_new", 2: "swish", 3: "gelu", 4: "quick_gelu", 5: "tanh"}
PARTS = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
NORMS = {
    "self_attention": "self_attn_layer_norm",
    "attention": "encoder_attn_layer_norm",
    "ffn": "final_layer_norm",
}


@dataclass
class FolderContent:
    """The content of a CTranslate2 folder."""

    variables: dict[str, Tensor]
    vocabulary: object = field(default_factory=lambda: list(TOKENS))
    config: dict[str, object] = field(default_factory=lambda: {"eos_token": "</s>", "layer_norm_epsilon": None})
    aliases: dict[str, str] = field(
        default_factory=lambda: {
            "decoder/projection/weight": "decoder/embeddings/weight",
            "encoder/embeddings_0/weight": "decoder/embeddings/weight",
            "encoder/position_encodings/encodings": ENCODINGS,
        }
    )

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "model.bin").write_bytes(model_bytes(self.variables, self.aliases))
        (folder / "config.json").write_text(json.dumps(self.config))
        (folder / "shared_vocabulary.json").write_text(json.dumps(self.vocabulary))
        return folder


def marian_model(activation: int = 2, scaled: bool = True, vocab_size: int = VOCAB) -> MarianMTModel:
    """Return a small Marian model of transformers with random weights."""
    config = MarianConfig(
        vocab_size=vocab_size + 1,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=40,
        activation_function=ACTIVATIONS[activation],
        scale_embedding=scaled,
        max_position_embeddings=CONTEXT,
        pad_token_id=vocab_size,
        eos_token_id=0,
        decoder_start_token_id=vocab_size,
        forced_eos_token_id=None,
    )
    torch.manual_seed(0)
    model = MarianMTModel(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "embed_positions" not in name:
                tensor.copy_(torch.randn(tensor.shape) * 0.3)
        model.model.shared.weight[vocab_size] = 0
        model.final_logits_bias.copy_(torch.randn(1, vocab_size + 1))
    return model


def folder_content(model: MarianMTModel, activation: int = 2, scale: Tensor | None = None) -> FolderContent:
    state = model.state_dict()
    variables = {
        "decoder/embeddings/weight": state["model.shared.weight"][:-1],
        "decoder/projection/bias": state["final_logits_bias"][0, :-1],
        ENCODINGS: model.model.decoder.embed_positions.weight.detach(),
        "decoder/start_from_zero_embedding": torch.tensor(1, dtype=torch.int8),
        "decoder/alibi": torch.tensor(0, dtype=torch.int8),
        "decoder/scale_alibi": torch.tensor(0, dtype=torch.int8),
        "decoder/alignment_layer": torch.tensor(-1, dtype=torch.int16),
        "encoder/embeddings_merge": torch.tensor(0, dtype=torch.int8),
    }
    for stack, num_layers, num_heads in (("encoder", 2, 4), ("decoder", 3, 2)):
        variables |= {
            f"{stack}/num_heads": torch.tensor(num_heads, dtype=torch.int16),
            f"{stack}/pre_norm": torch.tensor(0, dtype=torch.int8),
            f"{stack}/activation": torch.tensor(activation, dtype=torch.int8),
            f"{stack}/scale_embeddings": torch.tensor(1, dtype=torch.int8) if scale is None else scale,
        }
        for layer in range(num_layers):
            variables |= layer_variables(state, f"{stack}/layer_{layer}", f"model.{stack}.layers.{layer}")
    return FolderContent(variables)


def layer_variables(state: dict[str, Tensor], ours: str, theirs: str) -> dict[str, Tensor]:
    variables = {}
    for name, parts in PARTS.items():
        if f"{theirs}.{parts[0]}.weight" in state:
            for leaf in ("weight", "bias"):
                variables[f"{ours}/{name}/{leaf}"] = torch.cat([state[f"{theirs}.{part}.{leaf}"] for part in parts])
    for name, part in NORMS.items():
        if f"{theirs}.{part}.weight" in state:
            variables[f"{ours}/{name}/layer_norm/gamma"] = state[f"{theirs}.{part}.weight"]
            variables[f"{ours}/{name}/layer_norm/beta"] = state[f"{theirs}.{part}.bias"]
    return variables


def quantize(variables: dict[str, Tensor]) -> dict[str, Tensor]:
    """Store matrices in 8 bits with a scale for each row, and the other tensors in 16 bits."""
    stored = {}
    for name, tensor in variables.items():
        if name.endswith("/weight"):
            scale = 127 / tensor.abs().amax(dim=1)
            stored |= {name: (tensor * scale[:, None]).round().char(), f"{name}_scale": scale}
        else:
            stored[name] = tensor.half() if tensor.is_floating_point() and tensor.dim() else tensor
    return stored


SOURCE = torch.tensor([[5, 9, 22, 3, 0], [7, 7, 29, 1, 0]])
TARGET = torch.tensor([[VOCAB, 4, 17, 9], [VOCAB, 28, 2, 2]])


@torch.no_grad()
def difference(network: clearhead.Transformer, model: MarianMTModel) -> float:
    """Return the largest difference between logits, except for the start token, whose logits are low in ours."""
    ours = network.decode(TARGET, network.encode(SOURCE))
    theirs = model(input_ids=SOURCE, decoder_input_ids=TARGET).logits
    assert (ours[..., VOCAB] < -9000).all()
    assert ours.isfinite().all()
    return float((ours - theirs)[..., :VOCAB].abs().max())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scale", [None, 0, 1.0, math.sqrt(WIDTH)], ids=str)
def test_logits_equal_those_of_transformers(tmp_path: Path, activation: int, scale: float | None) -> None:
    """A whole number switches scaling by √width on or off; any other number is the factor itself."""
    stored = None if scale is None else torch.tensor(scale, dtype=torch.int8 if scale == 0 else torch.float32)
    model = marian_model(activation, scaled=scale not in (0, 1.0))
    folder = folder_content(model, activation, stored).write(tmp_path)
    loaded = load_ctranslate2(folder)
    assert difference(loaded.network, model) <= 1e-5
    assert loaded.family is family_of_type("marian")
    assert loaded.special_ids == {"decoder_start_token_id": VOCAB, "eos_token_id": 0, "pad_token_id": VOCAB}
    assert read_config(folder) == loaded.network.config
    assert loaded.network.config.context == CONTEXT


def test_quantized_weights_are_loaded_in_one_dtype(tmp_path: Path) -> None:
    content = folder_content(marian_model())
    content.variables = quantize(content.variables)
    loaded = load_ctranslate2(content.write(tmp_path))
    assert {tensor.dtype for tensor in loaded.network.parameters()} == {torch.float32}
    assert difference(loaded.network, marian_model()) < 0.3
    assert {
        tensor.dtype for tensor in load_ctranslate2(tmp_path, LoadOptions(dtype=torch.bfloat16)).network.parameters()
    } == {torch.bfloat16}


def test_half_precision_is_kept(tmp_path: Path) -> None:
    content = folder_content(marian_model())
    content.variables = {
        name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in content.variables.items()
    }
    network = load_ctranslate2(content.write(tmp_path)).network
    assert {tensor.dtype for tensor in network.parameters()} == {torch.float16}
    assert network.head.bias.isfinite().all()


def test_equal_tensors_may_be_aliases(tmp_path: Path) -> None:
    content, model = folder_content(marian_model()), marian_model()
    one, other = "encoder/layer_0/ffn/layer_norm/beta", "encoder/layer_1/ffn/layer_norm/beta"
    del content.variables[other]
    content.aliases[other] = one
    with torch.no_grad():
        model.model.encoder.layers[1].final_layer_norm.bias.copy_(model.model.encoder.layers[0].final_layer_norm.bias)
    assert difference(load_ctranslate2(content.write(tmp_path)).network, model) <= 1e-5


def test_a_folder_without_a_sentencepiece_model_has_no_tokenizer(tmp_path: Path) -> None:
    folder = folder_content(marian_model()).write(tmp_path)
    assert is_ctranslate2(folder)
    assert open_model(folder).tokenizer is None
    model = clearhead.load(folder)
    generation = model.generate([5, 9, 22, 3, 0], max_new_tokens=8)
    theirs = marian_model()
    theirs.final_logits_bias[0, VOCAB] = -1e4
    expected = theirs.generate(SOURCE[:1], max_new_tokens=8, do_sample=False, num_beams=1)
    assert generation.tokens == expected[0, 1:].tolist()


def set_number(name: str, value: float, dtype: torch.dtype = torch.int8) -> Callable[[FolderContent], object]:
    return lambda content: content.variables.update({name: torch.tensor(value, dtype=dtype)})


def set_tensor(name: str, tensor: Tensor) -> Callable[[FolderContent], object]:
    return lambda content: content.variables.update({name: tensor})


def remove(*names: str) -> Callable[[FolderContent], object]:
    return lambda content: [content.variables.pop(name) for name in names]


def untie(alias: str, num_rows: int) -> Callable[[FolderContent], object]:
    return lambda content: (content.aliases.pop(alias), content.variables.update({alias: torch.zeros(num_rows, WIDTH)}))


def shift_positions(content: FolderContent) -> None:
    content.variables[ENCODINGS][3, 5] += 1e-5


def interleave_positions(content: FolderContent) -> None:
    table = content.variables[ENCODINGS]
    content.variables[ENCODINGS] = table.reshape(-1, 2, WIDTH // 2).mT.reshape(table.shape)


NOT_MARIAN = [
    (set_number("encoder/pre_norm", 1), "encoder/pre_norm is 1; Marian models have 0"),
    (remove("decoder/pre_norm"), "decoder/pre_norm is 1; Marian models have 0"),
    (set_number("decoder/alibi", 1), "decoder/alibi is 1; Marian models have 0"),
    (remove("decoder/start_from_zero_embedding"), "start_from_zero_embedding is 0; Marian models have 1"),
    (set_number("encoder/multi_query_attention", 1), "multi_query_attention is 1; Marian models have 0"),
    (set_number("decoder/activation", 6), "the activation is number 2 and 6"),
    (set_number("decoder/activation", 1), "the activation is number 1 and 2"),
    (remove("encoder/activation"), "must have a whole number as encoder/activation, not None"),
    (remove("decoder/num_heads"), "must have a whole number as decoder/num_heads, not None"),
    (
        set_number("decoder/num_heads", math.nan, torch.float32),
        "a whole number as decoder/num_heads, not nan",
    ),
    (set_number("decoder/num_heads", 0), "the width 16 cannot be divided among 0 heads"),
    (set_number("decoder/num_heads", -2), "the width 16 cannot be divided among -2 heads"),
    (set_number("decoder/num_heads", 3), "the width 16 cannot be divided among 3 heads"),
    (set_number("decoder/scale_embeddings", 0), "embeddings are scaled by"),
    (set_number("decoder/scale_embeddings", 3.0, torch.float32), "embeddings are scaled by"),
    (set_number("decoder/scale_embeddings", math.nan, torch.float32), "embeddings are scaled by"),
    (
        set_number("decoder/scale_outputs", 0.5, torch.float32),
        "scale_outputs is 0.5, which Marian models do not",
    ),
    (set_number("decoder/layer_0/self_attention/rotary_dim", 4), "rotary_dim is 4, which Marian models do not have"),
    (remove("encoder/layer_0/ffn/linear_1/bias"), "lacks the tensor encoder/layer_0/ffn/linear_1/bias"),
    (remove("decoder/projection/bias"), "lacks the tensor decoder/projection/bias"),
    (remove("decoder/layer_1/attention/linear_1/weight"), "lacks the tensor decoder/layer_1/attention/linear_1/weight"),
    (remove("decoder/layer_1/ffn/linear_0/bias"), "which this model does not have"),
    (
        untie("decoder/projection/weight", VOCAB),
        "projection/weight is not the same tensor as decoder/embeddings/weight",
    ),
    (
        untie("encoder/embeddings_0/weight", 7),
        "embeddings_0/weight is not the same tensor as decoder/embeddings/weight",
    ),
    (
        lambda content: content.aliases.pop("encoder/position_encodings/encodings"),
        "lacks the tensor encoder/position_enc",
    ),
    (shift_positions, NOT_SINES),
    (interleave_positions, NOT_SINES),
    (set_tensor(ENCODINGS, torch.full((CONTEXT, WIDTH), math.nan)), NOT_SINES),
    (set_tensor(ENCODINGS, torch.zeros(CONTEXT)), NOT_SINES),
    (set_tensor(ENCODINGS, torch.zeros(CONTEXT, WIDTH).int()), NOT_SINES),
    (set_tensor(ENCODINGS, torch.zeros(CONTEXT, WIDTH - 1)), NOT_SINES),
    (
        set_tensor("decoder/projection/bias", torch.zeros(VOCAB).char()),
        "bias holds torch.int8, not floating",
    ),
    (set_tensor("decoder/projection/bias", torch.zeros(VOCAB, 2)), "bias has shape (31, 2); the config needs (31,)"),
    (
        set_tensor("encoder/layer_0/ffn/linear_0/weight", torch.zeros(24, WIDTH).char()),
        "holds torch.int8, not floating",
    ),
    (set_tensor("encoder/layer_1/ffn/linear_0/bias", torch.zeros(23)), "bias has shape (23,); the config needs (24,)"),
    (
        set_tensor("encoder/layer_norm/gamma", torch.ones(WIDTH)),
        "encoder/layer_norm/gamma, which this model does not have",
    ),
    (lambda content: content.config.update(layer_norm_epsilon=1e-6), "layer_norm_epsilon is 1e-06"),
    (lambda content: content.config.update(add_source_bos=True), "add_source_bos is True"),
    (lambda content: content.config.update(eos_token="<end>"), "lacks the end-of-text token '<end>'"),
    (lambda content: content.vocabulary.pop(), "has 29 tokens, but the model has 30"),
    (lambda content: content.vocabulary.append("x"), "has 31 tokens, but the model has 30"),
    (lambda content: content.vocabulary.insert(0, 5), "neither a list of tokens nor an object"),
]


@pytest.mark.parametrize(("change", "message"), NOT_MARIAN, ids=[message for _, message in NOT_MARIAN])
def test_models_other_than_marian_are_rejected(
    tmp_path: Path, change: Callable[[FolderContent], object], message: str
) -> None:
    content = folder_content(marian_model())
    content.variables = {name: tensor.clone() for name, tensor in content.variables.items()}
    change(content)
    with pytest.raises(ClearheadError) as caught:
        load_ctranslate2(content.write(tmp_path))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            b"TransformerSpec\0\7",
            b"TransformerSpec\0\6",
            "TransformerSpec of revision 6; only a TransformerSpec of revision 7",
        ),
        (b"TransformerSpec\0", b"TransformXXSpec\0", "holds a TransformXXSpec"),
        (b"\6\0\0\0", b"\5\0\0\0", "it has version 5"),
    ],
)
def test_other_specs_are_rejected(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    path = folder_content(marian_model()).write(tmp_path) / "model.bin"
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    for function in (open_model, read_config):
        with pytest.raises(ClearheadError, match=message):
            function(tmp_path)


def test_the_error_names_a_missing_vocabulary(tmp_path: Path) -> None:
    (folder_content(marian_model()).write(tmp_path) / "shared_vocabulary.json").unlink()
    with pytest.raises(ClearheadError, match=r"shared_vocabulary\.json cannot be read"):
        open_model(tmp_path)


def test_a_pickle_named_model_bin_is_not_a_ctranslate2_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x80\x02}q\0.")
    assert not is_ctranslate2(tmp_path)
    assert not is_ctranslate2(tmp_path / "model.bin")


# --- the real model

SENTENCES = {
    "你好，世界！": "Hello, world!",
    "我今天很高兴见到你们。": None,
    "人工智能正在改变我们的生活方式。": None,
    "请问，最近的火车站在哪里？": None,
}


@pytest.fixture(scope="module")
def translator(opus_mt: Path) -> clearhead.Model:
    return clearhead.load("opus-mt-zh-en", fast=False)  # PyTorch's own attention, as in transformers


@pytest.mark.download
@torch.no_grad()
def test_logits_of_the_real_model_equal_those_of_transformers(translator: clearhead.Model, opus_mt: Path) -> None:
    theirs = marian_in_transformers(open_ctranslate2(opus_mt).tensors)
    source = torch.tensor([translator.tokenizer.encode("人工智能正在改变我们的生活方式。")])
    target = torch.tensor([[65000, *range(2, 40)]])
    ours = translator.network.decode(target, translator.network.encode(source))[..., :65000]
    expected = theirs(input_ids=source, decoder_input_ids=target).logits[..., :65000]
    assert float((ours - expected).abs().max()) <= 1e-5


@pytest.mark.download
def test_translations_equal_those_of_the_model_saved_for_transformers(
    translator: clearhead.Model, tmp_path: Path
) -> None:
    translator.save(tmp_path, format="huggingface")
    model, tokenizer = MarianMTModel.from_pretrained(tmp_path).eval(), TheirTokenizer.from_pretrained(tmp_path)
    again = clearhead.load(tmp_path)
    assert same_network(again.network, translator.network)
    assert again.special_ids == translator.special_ids
    for text, translation in SENTENCES.items():
        ours = translator.generate(text, max_new_tokens=40)
        theirs = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=40, do_sample=False, num_beams=1)
        assert ours.tokens == theirs[0, 1:].tolist()
        assert ours.finish_reason == "stop"
        assert ours.text == tokenizer.decode(theirs[0], skip_special_tokens=True)
        assert translation in (None, ours.text)
    assert again.generate("你好，世界！").text == "".join(again.stream("你好，世界！")) == "Hello, world!"


@pytest.mark.download
def test_the_model_translates_after_saving_it_natively(translator: clearhead.Model, tmp_path: Path) -> None:
    again = clearhead.load(translator.save(tmp_path))
    assert again.special_ids == translator.special_ids
    assert again.generate("你好，世界！").text == "Hello, world!"


@pytest.mark.download
def test_a_hugging_face_folder_is_loaded_with_its_tokenizer(translator: clearhead.Model, tmp_path: Path) -> None:
    translator.tokenizer.save(tmp_path)
    tokenizer, theirs = TheirTokenizer.from_pretrained(tmp_path), marian_model(vocab_size=65000)
    tokenizer.save_pretrained(tmp_path / "theirs")
    theirs.save_pretrained(tmp_path / "theirs")
    ours = clearhead.load(tmp_path / "theirs").generate("你好，世界！", max_new_tokens=5)
    expected = theirs.generate(**tokenizer("你好，世界！", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert ours.tokens == expected[0, 1:].tolist()
    assert ours.text == tokenizer.decode(expected[0], skip_special_tokens=True)

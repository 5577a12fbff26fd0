"""CTranslate2 folders of Marian models: small ones with transformers' weights, and a real one that translates."""

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
from clearhead.checkpoint.load import open_model, read_config
from clearhead.errors import ClearheadError
from clearhead.families import bart
from tests.checkpoint.test_ctranslate2 import marian_in_transformers, model_bytes
from tests.checkpoint.tiny import same_network

VOCAB, WIDTH, CONTEXT = 30, 16, 12  # transformers' table has one row more, for the padding
TOKENS = ["</s>", "<unk>", *(f"▁w{number}" for number in range(VOCAB - 2))]
ENCODINGS = "decoder/position_encodings/encodings"
NOT_SINES = "position_encodings/encodings is not a table of sines, then cosines"
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
class Written:
    """What a CTranslate2 folder holds, before it is written."""

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

    def to(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "model.bin").write_bytes(model_bytes(self.variables, self.aliases))
        (folder / "config.json").write_text(json.dumps(self.config))
        (folder / "shared_vocabulary.json").write_text(json.dumps(self.vocabulary))
        return folder


def their_model(activation: int = 2, scaled: bool = True, vocab_size: int = VOCAB) -> MarianMTModel:
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


def written(model: MarianMTModel, activation: int = 2, scale: Tensor | None = None) -> Written:
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
    return Written(variables)


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


def quantised(variables: dict[str, Tensor]) -> dict[str, Tensor]:
    """8 bits with a scale for each row; the others in 16 bits."""
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
    """The largest between logits of real tokens; the token to start from is out of reach in ours."""
    ours = network.decode(TARGET, network.encode(SOURCE))
    theirs = model(input_ids=SOURCE, decoder_input_ids=TARGET).logits
    assert (ours[..., VOCAB] < -9000).all()
    assert ours.isfinite().all()
    return float((ours - theirs)[..., :VOCAB].abs().max())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scale", [None, 0, 1.0, math.sqrt(WIDTH)], ids=str)
def test_logits_are_those_of_transformers(tmp_path: Path, activation: int, scale: float | None) -> None:
    """In whole numbers 0 and 1 answer whether to scale by √width; in others the factor itself is given."""
    stored = None if scale is None else torch.tensor(scale, dtype=torch.int8 if scale == 0 else torch.float32)
    model = their_model(activation, scaled=scale not in (0, 1.0))
    folder = written(model, activation, stored).to(tmp_path)
    loaded = load_ctranslate2(folder)
    assert difference(loaded.network, model) <= 1e-5
    assert loaded.family is bart.FAMILY
    assert loaded.special_ids == {"decoder_start_token_id": VOCAB, "eos_token_id": 0, "pad_token_id": VOCAB}
    assert read_config(folder) == loaded.network.config
    assert loaded.network.config.context == CONTEXT


def test_quantised_weights_are_read_in_one_precision(tmp_path: Path) -> None:
    given = written(their_model())
    given.variables = quantised(given.variables)
    loaded = load_ctranslate2(given.to(tmp_path))
    assert {tensor.dtype for tensor in loaded.network.parameters()} == {torch.float32}
    assert difference(loaded.network, their_model()) < 0.3
    assert {tensor.dtype for tensor in load_ctranslate2(tmp_path, torch.bfloat16).network.parameters()} == {
        torch.bfloat16
    }


def test_half_precision_stays(tmp_path: Path) -> None:
    given = written(their_model())
    given.variables = {
        name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in given.variables.items()
    }
    network = load_ctranslate2(given.to(tmp_path)).network
    assert {tensor.dtype for tensor in network.parameters()} == {torch.float16}
    assert network.head.bias.isfinite().all()


def test_equal_tensors_may_be_stored_once(tmp_path: Path) -> None:
    given, model = written(their_model()), their_model()
    one, other = "encoder/layer_0/ffn/layer_norm/beta", "encoder/layer_1/ffn/layer_norm/beta"
    del given.variables[other]
    given.aliases[other] = one
    with torch.no_grad():
        model.model.encoder.layers[1].final_layer_norm.bias.copy_(model.model.encoder.layers[0].final_layer_norm.bias)
    assert difference(load_ctranslate2(given.to(tmp_path)).network, model) <= 1e-5


def test_a_folder_without_a_sentencepiece_model_takes_ids(tmp_path: Path) -> None:
    folder = written(their_model()).to(tmp_path)
    assert is_ctranslate2(folder)
    assert open_model(folder).tokenizer is None
    model = clearhead.load(folder)
    made = model.generate([5, 9, 22, 3, 0], max_new_tokens=8)
    theirs = their_model()
    theirs.final_logits_bias[0, VOCAB] = -1e4
    expected = theirs.generate(SOURCE[:1], max_new_tokens=8, do_sample=False, num_beams=1)
    assert made.tokens == expected[0, 1:].tolist()


def change(name: str, value: float, dtype: torch.dtype = torch.int8) -> Callable[[Written], object]:
    return lambda given: given.variables.update({name: torch.tensor(value, dtype=dtype)})


def store(name: str, tensor: Tensor) -> Callable[[Written], object]:
    return lambda given: given.variables.update({name: tensor})


def drop(*names: str) -> Callable[[Written], object]:
    return lambda given: [given.variables.pop(name) for name in names]


def untie(alias: str, num_rows: int) -> Callable[[Written], object]:
    return lambda given: (given.aliases.pop(alias), given.variables.update({alias: torch.zeros(num_rows, WIDTH)}))


def shift_positions(given: Written) -> None:
    given.variables[ENCODINGS][3, 5] += 1e-5


def interleave_positions(given: Written) -> None:
    table = given.variables[ENCODINGS]
    given.variables[ENCODINGS] = table.reshape(-1, 2, WIDTH // 2).mT.reshape(table.shape)


UNSOUND = [
    (change("encoder/pre_norm", 1), "encoder/pre_norm is 1; Marian models have 0"),
    (drop("decoder/pre_norm"), "decoder/pre_norm is 1; Marian models have 0"),
    (change("decoder/alibi", 1), "decoder/alibi is 1; Marian models have 0"),
    (drop("decoder/start_from_zero_embedding"), "start_from_zero_embedding is 0; Marian models have 1"),
    (change("encoder/multi_query_attention", 1), "multi_query_attention is 1; Marian models have 0"),
    (change("decoder/activation", 6), "the activation is number 2 and 6"),
    (change("decoder/activation", 1), "the activation is number 1 and 2"),
    (drop("encoder/activation"), "must have a whole number as encoder/activation, not None"),
    (drop("decoder/num_heads"), "must have a whole number as decoder/num_heads, not None"),
    (change("decoder/num_heads", math.nan, torch.float32), "must have a whole number as decoder/num_heads, not nan"),
    (change("decoder/num_heads", 0), "the width 16 cannot be split among 0 heads"),
    (change("decoder/num_heads", -2), "the width 16 cannot be split among -2 heads"),
    (change("decoder/num_heads", 3), "the width 16 cannot be split among 3 heads"),
    (change("decoder/scale_embeddings", 0), "embeddings are scaled by"),
    (change("decoder/scale_embeddings", 3.0, torch.float32), "embeddings are scaled by"),
    (change("decoder/scale_embeddings", math.nan, torch.float32), "embeddings are scaled by"),
    (change("decoder/scale_outputs", 0.5, torch.float32), "decoder/scale_outputs is 0.5, which Marian models do not"),
    (change("decoder/layer_0/self_attention/rotary_dim", 4), "rotary_dim is 4, which Marian models do not have"),
    (drop("encoder/layer_0/ffn/linear_1/bias"), "lacks the tensor encoder/layer_0/ffn/linear_1/bias"),
    (drop("decoder/projection/bias"), "lacks the tensor decoder/projection/bias"),
    (drop("decoder/layer_1/attention/linear_1/weight"), "lacks the tensor decoder/layer_1/attention/linear_1/weight"),
    (drop("decoder/layer_1/ffn/linear_0/bias"), "which this model has no place for"),
    (untie("decoder/projection/weight", VOCAB), "decoder/projection/weight is not decoder/embeddings/weight"),
    (untie("encoder/embeddings_0/weight", 7), "encoder/embeddings_0/weight is not decoder/embeddings/weight"),
    (lambda given: given.aliases.pop("encoder/position_encodings/encodings"), "lacks the tensor encoder/position_enc"),
    (shift_positions, NOT_SINES),
    (interleave_positions, NOT_SINES),
    (store(ENCODINGS, torch.full((CONTEXT, WIDTH), math.nan)), NOT_SINES),
    (store(ENCODINGS, torch.zeros(CONTEXT)), NOT_SINES),
    (store(ENCODINGS, torch.zeros(CONTEXT, WIDTH).int()), NOT_SINES),
    (store(ENCODINGS, torch.zeros(CONTEXT, WIDTH - 1)), NOT_SINES),
    (store("decoder/projection/bias", torch.zeros(VOCAB).char()), "projection/bias holds torch.int8, not floating"),
    (store("decoder/projection/bias", torch.zeros(VOCAB, 2)), "projection/bias is (31, 2); the config asks for (31,)"),
    (store("encoder/layer_0/ffn/linear_0/weight", torch.zeros(24, WIDTH).char()), "holds torch.int8, not floating"),
    (store("encoder/layer_1/ffn/linear_0/bias", torch.zeros(23)), "linear_0/bias is (23,); the config asks for (24,)"),
    (
        store("encoder/layer_norm/gamma", torch.ones(WIDTH)),
        "encoder/layer_norm/gamma, which this model has no place for",
    ),
    (lambda given: given.config.update(layer_norm_epsilon=1e-6), "layer_norm_epsilon is 1e-06"),
    (lambda given: given.config.update(add_source_bos=True), "add_source_bos is True"),
    (lambda given: given.config.update(eos_token="<end>"), "lacks '<end>', which ends a text"),
    (lambda given: given.vocabulary.pop(), "has 29 tokens, but the model 30"),
    (lambda given: given.vocabulary.append("x"), "has 31 tokens, but the model 30"),
    (lambda given: given.vocabulary.insert(0, 5), "neither a list of tokens nor an object"),
]


@pytest.mark.parametrize(("spoil", "complaint"), UNSOUND, ids=[complaint for _, complaint in UNSOUND])
def test_what_is_not_marian_is_refused(tmp_path: Path, spoil: Callable[[Written], object], complaint: str) -> None:
    given = written(their_model())
    given.variables = {name: tensor.clone() for name, tensor in given.variables.items()}
    spoil(given)
    with pytest.raises(ClearheadError) as caught:
        load_ctranslate2(given.to(tmp_path))
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            b"TransformerSpec\0\7",
            b"TransformerSpec\0\6",
            "TransformerSpec of revision 6; a TransformerSpec of revision 7",
        ),
        (b"TransformerSpec\0", b"TransformXXSpec\0", "holds a TransformXXSpec"),
        (b"\6\0\0\0", b"\5\0\0\0", "its version is 5"),
    ],
)
def test_other_specs_are_refused(tmp_path: Path, old: bytes, new: bytes, complaint: str) -> None:
    path = written(their_model()).to(tmp_path) / "model.bin"
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    for opens in (open_model, read_config):
        with pytest.raises(ClearheadError, match=complaint):
            opens(tmp_path)


def test_a_missing_vocabulary_is_one_sentence(tmp_path: Path) -> None:
    (written(their_model()).to(tmp_path) / "shared_vocabulary.json").unlink()
    with pytest.raises(ClearheadError, match=r"shared_vocabulary\.json cannot be read"):
        open_model(tmp_path)


def test_a_pickle_called_model_bin_is_not_one(tmp_path: Path) -> None:
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
def test_real_logits_are_those_of_transformers(translator: clearhead.Model, opus_mt: Path) -> None:
    theirs = marian_in_transformers(open_ctranslate2(opus_mt).tensors)
    source = torch.tensor([translator.tokenizer.encode("人工智能正在改变我们的生活方式。")])
    target = torch.tensor([[65000, *range(2, 40)]])
    ours = translator.network.decode(target, translator.network.encode(source))[..., :65000]
    expected = theirs(input_ids=source, decoder_input_ids=target).logits[..., :65000]
    assert float((ours - expected).abs().max()) <= 1e-5


@pytest.mark.download
def test_it_translates_here_and_saved_in_transformers(translator: clearhead.Model, tmp_path: Path) -> None:
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
def test_it_translates_from_our_own_folder(translator: clearhead.Model, tmp_path: Path) -> None:
    again = clearhead.load(translator.save(tmp_path))
    assert again.special_ids == translator.special_ids
    assert again.generate("你好，世界！").text == "Hello, world!"


@pytest.mark.download
def test_a_hugging_face_folder_gets_its_tokenizer(translator: clearhead.Model, tmp_path: Path) -> None:
    translator.tokenizer.save(tmp_path)
    tokenizer, theirs = TheirTokenizer.from_pretrained(tmp_path), their_model(vocab_size=65000)
    tokenizer.save_pretrained(tmp_path / "theirs")
    theirs.save_pretrained(tmp_path / "theirs")
    ours = clearhead.load(tmp_path / "theirs").generate("你好，世界！", max_new_tokens=5)
    expected = theirs.generate(**tokenizer("你好，世界！", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert ours.tokens == expected[0, 1:].tolist()
    assert ours.text == tokenizer.decode(expected[0], skip_special_tokens=True)

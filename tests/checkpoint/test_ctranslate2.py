"""CTranslate2 files: some written here in the published layout, and a real one that transformers translates with."""

import json
import random
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
import sentencepiece
import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel

from clearhead.checkpoint.ctranslate2 import open_ctranslate2
from clearhead.errors import ClearheadError

TYPES = [torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16]


def string(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def variable(name: str, tensor: Tensor) -> bytes:
    data = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
    shape = struct.pack(f"<B{tensor.dim()}I", tensor.dim(), *tensor.shape)
    return string(name) + shape + struct.pack("<BI", TYPES.index(tensor.dtype), len(data)) + data


def model_bytes(variables: Mapping[str, Tensor], aliases: Mapping[str, str], version: int = 6) -> bytes:
    parts = [struct.pack("<I", version), string("TransformerSpec"), struct.pack("<II", 7, len(variables))]
    parts += [variable(name, tensor) for name, tensor in variables.items()]
    parts += [struct.pack("<I", len(aliases))]
    parts += [string(alias) + string(name) for alias, name in aliases.items()]
    return b"".join(parts)


@pytest.fixture
def variables() -> dict[str, Tensor]:
    return {
        "decoder/num_heads": torch.tensor(8, dtype=torch.int16),
        "decoder/pre_norm": torch.tensor(0, dtype=torch.int8),
        "decoder/scale": torch.tensor(0.5),
        "decoder/bias": torch.tensor([1.5, -2.0], dtype=torch.float16),
        "decoder/other_bias": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
        "decoder/heads": torch.tensor([[1, 2], [3, 70000]], dtype=torch.int32),
        "decoder/weight": torch.tensor([[127, -127, 1], [2, 0, -4]], dtype=torch.int8),
        "decoder/weight_scale": torch.tensor([127.0, 0.5]),
        "encoder/weight": torch.tensor([[1000, -500], [250, 0]], dtype=torch.int16),
        "encoder/weight_scale": torch.tensor(1000.0),
        "encoder/gain": torch.ones(3),
        "encoder/gain_scale": torch.ones(3) * 2,
    }


ALIASES = {"projection/weight": "decoder/weight", "projection/num_heads": "decoder/num_heads"}


def test_all_variables_are_read(tmp_path: Path, variables: dict[str, Tensor]) -> None:
    (tmp_path / "model.bin").write_bytes(model_bytes(variables, ALIASES))
    (tmp_path / "config.json").write_text('{"bos_token": "<s>"}')
    model = open_ctranslate2(tmp_path)
    assert (model.spec, model.revision, model.config) == ("TransformerSpec", 7, {"bos_token": "<s>"})
    assert model.aliases == ALIASES
    assert model.settings == {
        "decoder/num_heads": 8, "decoder/pre_norm": 0, "decoder/scale": 0.5, "projection/num_heads": 8,
    }  # fmt: skip
    decoder_weight = torch.tensor([[1.0, -1.0, 1 / 127], [4.0, 0.0, -8.0]])
    expected = {
        "decoder/bias": variables["decoder/bias"],
        "decoder/other_bias": variables["decoder/other_bias"],
        "decoder/heads": variables["decoder/heads"],
        "decoder/weight": decoder_weight,
        "projection/weight": decoder_weight,
        "encoder/weight": torch.tensor([[1.0, -0.5], [0.25, 0.0]]),
        # A variable of floats has no scale, even if another variable has the name of one.
        "encoder/gain": variables["encoder/gain"],
        "encoder/gain_scale": variables["encoder/gain_scale"],
    }
    assert model.tensors.keys() == expected.keys()
    assert len(model.tensors) == len(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(model.tensors[name], tensor, rtol=0, atol=0)


def test_a_file_without_a_config(tmp_path: Path, variables: dict[str, Tensor]) -> None:
    (tmp_path / "weights").write_bytes(model_bytes(variables, {}))
    model = open_ctranslate2(tmp_path / "weights")
    assert (model.config, model.aliases) == ({}, {})


def test_an_alias_of_a_scale_is_not_a_tensor(tmp_path: Path, variables: dict[str, Tensor]) -> None:
    aliases = {"projection/weight": "decoder/weight", "projection/weight_scale": "decoder/weight_scale"}
    (tmp_path / "model.bin").write_bytes(model_bytes(variables, aliases))
    model = open_ctranslate2(tmp_path)
    assert model.aliases == {"projection/weight": "decoder/weight"}
    assert torch.equal(model.tensors["projection/weight"], model.tensors["decoder/weight"])
    assert "projection/weight_scale" not in model.tensors


PLAIN = {"a": torch.zeros(2, 3)}
HEAD = struct.pack("<I", 6) + string("S") + struct.pack("<II", 1, 1) + string("a")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "4 bytes are expected, but 0 are left in the file"),
        (model_bytes(PLAIN, {}, version=5), "it has version 5"),
        (model_bytes(PLAIN, {})[:-1], "bytes are expected"),
        (model_bytes(PLAIN, {}) + b"\0", "1 bytes follow its end"),
        (model_bytes(PLAIN, {"b": "c"}), "the alias 'b' refers to 'c', which is missing"),
        (model_bytes(PLAIN, {"a": "a"}), "'a' occurs twice"),
        (model_bytes(PLAIN, {"b": "a"}).replace(string("b"), b"\x02\0bb"), "b'bb' is not a valid name"),
        (model_bytes(PLAIN, {"b": "a"}).replace(string("b"), b"\x02\0\xff\0"), "is not a valid name"),
        (model_bytes(PLAIN, {"b": "a"}).replace(string("b"), b"\0\0"), "b'' is not a valid name"),
        (model_bytes(PLAIN | {"b": torch.zeros(1)}, {}).replace(string("b"), string("a")), "'a' occurs twice"),
        (HEAD + b"\x09" + bytes(99), "has 9 dimensions"),
        (HEAD + struct.pack("<BIBI", 1, 1, 6, 4) + bytes(8), "has type 6"),
        (HEAD + struct.pack("<BIBI", 1, 2, 0, 4) + bytes(8), r"of shape \(2,\) cannot have 4 bytes"),
        (HEAD + struct.pack("<BIIBI", 2, 0, 2**32 - 1, 0, 0) + bytes(4), "cannot have 0 bytes"),
        (HEAD + struct.pack("<BIBI", 1, 2**30, 0, 2**32 - 1), "4294967295 bytes are expected"),
        (model_bytes({"w": PLAIN["a"].char(), "w_scale": torch.ones(3)}, {}), "scale of shape"),
        (model_bytes({"w": PLAIN["a"].char(), "w_scale": torch.ones(2).int()}, {}), "scale of shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_files_are_rejected(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "model.bin").write_bytes(data)
    with pytest.raises(ClearheadError, match=message):
        open_ctranslate2(tmp_path)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_must_be_positive(tmp_path: Path, scale: float) -> None:
    weights = {"w": torch.ones(2, 3, dtype=torch.int8), "w_scale": torch.tensor([1.0, scale])}
    (tmp_path / "model.bin").write_bytes(model_bytes(weights, {}))
    with pytest.raises(ClearheadError, match="the scale of 'w'"):
        open_ctranslate2(tmp_path).tensors["w"]


@pytest.mark.parametrize("config", ["", "{", "[1]", "[" * 100_000, b"\xff\xfe{"])
def test_an_invalid_config_is_rejected(tmp_path: Path, config: str | bytes) -> None:
    (tmp_path / "model.bin").write_bytes(model_bytes(PLAIN, {}))
    (tmp_path / "config.json").write_bytes(config if isinstance(config, bytes) else config.encode())
    with pytest.raises(ClearheadError, match=r"config\.json (is not valid JSON|is not UTF-8|contains a list)"):
        open_ctranslate2(tmp_path)


def test_unreadable_and_truncated_files_are_rejected(tmp_path: Path, variables: dict[str, Tensor]) -> None:
    with pytest.raises(ClearheadError, match=r"cannot read .*model\.bin"):
        open_ctranslate2(tmp_path)
    (tmp_path / "model.bin").write_bytes(model_bytes(variables, {}))
    tensors = open_ctranslate2(tmp_path).tensors
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ClearheadError, match="became shorter"):
        tensors["decoder/weight"]


def test_mutated_files_raise_only_clearhead_errors(tmp_path: Path, variables: dict[str, Tensor]) -> None:
    data, chance = model_bytes(variables, ALIASES), random.Random(0)
    num_rejected = 0
    for _ in range(300):
        mutant = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            mutant[chance.randrange(len(mutant))] = chance.choice((0, 1, 2, 9, 127, 255, chance.randrange(256)))
        start = chance.randrange(len(mutant))
        if chance.random() < 0.3:
            del mutant[start : start + chance.randint(1, 8)]
        (tmp_path / "model.bin").write_bytes(mutant)
        try:
            model = open_ctranslate2(tmp_path)
            for tensor in model.tensors.values():
                assert tensor.numel() < len(data)
        except ClearheadError:
            num_rejected += 1
    assert 100 < num_rejected < 300


@pytest.mark.download
def test_transformers_translates_with_a_real_model(opus_mt: Path) -> None:
    model = open_ctranslate2(opus_mt)
    assert (model.spec, model.revision) == ("TransformerSpec", 7)
    marian = marian_in_transformers(model.tensors)
    vocabulary = json.loads((opus_mt / "shared_vocabulary.json").read_text(encoding="utf-8"))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(opus_mt / "sentencepiece.model"))
    source = [vocabulary.index(piece) for piece in pieces.encode("你好，世界！", out_type=str)] + [0]
    target = [len(vocabulary)]
    with torch.inference_mode():
        while target[-1] != 0 and len(target) < 12:
            logits = marian(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target])).logits
            target.append(int(logits[0, -1, :-1].argmax()))
    assert target[-1] == 0
    # The SentencePiece model covers the source language only.
    text = "".join(vocabulary[token] for token in target[1:-1])
    assert text.replace("▁", " ") == " Hello, world!"


def marian_in_transformers(tensors: Mapping[str, Tensor]) -> MarianMTModel:
    """Build Marian in transformers. Its decoder starts from a zero vector: the embedding of the padding token."""
    config = MarianConfig(
        vocab_size=65001,
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        activation_function="swish",
        scale_embedding=True,
        max_position_embeddings=2048,
        pad_token_id=65000,
        eos_token_id=0,
        decoder_start_token_id=65000,
    )
    marian = MarianMTModel(config).eval()
    embedding = torch.cat([tensors["decoder/embeddings/weight"], torch.zeros(1, 512)])
    state = {
        "model.shared.weight": embedding,
        "final_logits_bias": torch.cat([tensors["decoder/projection/bias"], torch.zeros(1)]).unsqueeze(0),
    }
    for side in ("encoder", "decoder"):
        state[f"model.{side}.embed_positions.weight"] = tensors[f"{side}/position_encodings/encodings"]
        for layer in range(6):
            state |= marian_layer(tensors, f"{side}/layer_{layer}", f"model.{side}.layers.{layer}")
    missing, unexpected = marian.load_state_dict(state, strict=False)
    assert set(missing) <= {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"}
    assert unexpected == []
    return marian


def marian_layer(tensors: Mapping[str, Tensor], theirs: str, name: str) -> dict[str, Tensor]:
    """Return the weights of a layer. Self-attention stores query, key and value as one matrix, cross-attention two."""
    linears = {"ffn/linear_0": ["fc1"], "ffn/linear_1": ["fc2"]}
    linears["self_attention/linear_0"] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    linears["self_attention/linear_1"] = ["self_attn.out_proj"]
    norms = {"self_attention": "self_attn_layer_norm", "ffn": "final_layer_norm"}
    if theirs.startswith("decoder"):
        linears["attention/linear_0"] = ["encoder_attn.q_proj"]
        linears["attention/linear_1"] = ["encoder_attn.k_proj", "encoder_attn.v_proj"]
        linears["attention/linear_2"] = ["encoder_attn.out_proj"]
        norms["attention"] = "encoder_attn_layer_norm"
    state = {}
    for linear, parts in linears.items():
        for kind in ("weight", "bias"):
            chunks = tensors[f"{theirs}/{linear}/{kind}"].chunk(len(parts))
            state |= {f"{name}.{part}.{kind}": chunk for part, chunk in zip(parts, chunks, strict=True)}
    for norm, part in norms.items():
        state[f"{name}.{part}.weight"] = tensors[f"{theirs}/{norm}/layer_norm/gamma"]
        state[f"{name}.{part}.bias"] = tensors[f"{theirs}/{norm}/layer_norm/beta"]
    return state

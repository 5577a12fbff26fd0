"""llama2.c checkpoints: files written here in the published layout, and a real one run by transformers."""

import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from clearhead.checkpoint.llama2c import Llama2cHeader, open_llama2c
from clearhead.errors import ClearheadError

HEADER = (8, 12, 2, 4, 2, 10, 5)  # width, feed-forward, layers, heads, key-value heads, vocabulary, context


def checkpoint_bytes(generator: torch.Generator, *, tied: bool = True) -> tuple[bytes, dict[str, Tensor]]:
    """Return a small file in llama2.c's order, and its tensors, stacked over the layers as in llama2.c."""
    shapes = {
        "tok_embeddings": (10, 8), "attention_norm": (2, 8), "attention.wq": (2, 8, 8), "attention.wk": (2, 4, 8),
        "attention.wv": (2, 4, 8), "attention.wo": (2, 8, 8), "ffn_norm": (2, 8), "feed_forward.w1": (2, 12, 8),
        "feed_forward.w2": (2, 8, 12), "feed_forward.w3": (2, 12, 8), "norm": (8,), "cos": (5, 1), "sin": (5, 1),
    } | ({} if tied else {"output": (10, 8)})  # fmt: skip
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    sign = 1 if tied else -1
    header = struct.pack("<7i", *HEADER[:5], sign * HEADER[5], HEADER[6])
    return header + b"".join(tensor.numpy().tobytes() for tensor in tensors.values()), tensors


@pytest.mark.parametrize("tied", [True, False])
def test_all_tensors_are_read_in_the_order_of_llama2c(tmp_path: Path, generator: torch.Generator, tied: bool) -> None:
    data, stacked = checkpoint_bytes(generator, tied=tied)
    (tmp_path / "model.bin").write_bytes(data)
    checkpoint = open_llama2c(tmp_path / "model.bin")
    assert checkpoint.header == Llama2cHeader(
        width=8,
        feed_forward_width=12,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=10,
        context_length=5,
        tied=tied,
    )
    expected = {f"{name}.weight": stacked[name] for name in ("tok_embeddings", "norm", "output") if name in stacked}
    for name, tensor in stacked.items():
        if name.startswith(("attention", "f")):
            expected |= {f"layers.{layer}.{name}.weight": tensor[layer] for layer in range(2)}
    assert checkpoint.tensors.keys() == expected.keys()
    assert len(checkpoint.tensors) == 9 * 2 + 2 + (not tied)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensors[name], tensor), name


def test_each_access_returns_a_new_tensor(tmp_path: Path, generator: torch.Generator) -> None:
    (tmp_path / "model.bin").write_bytes(checkpoint_bytes(generator)[0])
    tensors = open_llama2c(tmp_path / "model.bin").tensors
    tensors["norm.weight"].zero_()
    assert tensors["norm.weight"].abs().sum() > 0
    with pytest.raises(KeyError):
        tensors["output.weight"]


def with_header(data: bytes, *values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values) + data[4 * len(values) :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], "bytes, but its header implies"),
        (lambda data: data + b"\0", "bytes, but its header implies"),
        (lambda data: data[:27], "too short"),
        (lambda data: b"", "too short"),
        (lambda data: with_header(data, 0x616B3432, 1), "of version 1; only version 0"),
        (lambda data: with_header(data, 0), "its header gives the sizes"),
        (lambda data: with_header(data, 8, -12), "its header gives the sizes"),
        (lambda data: with_header(data, 8, 12, 2, 3), "its header gives the sizes"),  # 8 is not divisible by 3 heads
        (lambda data: with_header(data, 8, 12, 2, 8), "its header gives the sizes"),  # a head of width 1 has no pairs
        (lambda data: with_header(data, 8, 12, 2, 4, 3), "its header gives the sizes"),
        (lambda data: with_header(data, 8, 12, 2**31 - 1), "bytes, but its header implies"),
    ],
)
def test_invalid_files_are_rejected(
    tmp_path: Path, generator: torch.Generator, change: Callable[[bytes], bytes], message: str
) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(change(checkpoint_bytes(generator)[0]))
    with pytest.raises(ClearheadError, match=message):
        open_llama2c(path)


def test_unreadable_and_truncated_files_are_rejected(tmp_path: Path, generator: torch.Generator) -> None:
    with pytest.raises(ClearheadError, match="is not a regular file but a folder"):
        open_llama2c(tmp_path)
    with pytest.raises(ClearheadError, match="cannot read"):
        open_llama2c(tmp_path / "missing.bin")
    path = tmp_path / "model.bin"
    path.write_bytes(checkpoint_bytes(generator)[0])
    tensors = open_llama2c(path).tensors
    path.write_bytes(b"")
    with pytest.raises(ClearheadError, match="became shorter"):
        tensors["norm.weight"]


def test_mutated_headers_raise_only_clearhead_errors(tmp_path: Path, generator: torch.Generator) -> None:
    data, path, chance = checkpoint_bytes(generator)[0], tmp_path / "model.bin", random.Random(0)
    num_rejected = 0
    for _ in range(300):
        mutant = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            mutant[chance.randrange(28)] = chance.choice((0, 1, 2, 127, 128, 255, chance.randrange(256)))
        path.write_bytes(mutant)
        try:
            tensors = open_llama2c(path).tensors
        except ClearheadError:
            num_rejected += 1
        else:
            assert sum(tensor.numel() for tensor in tensors.values()) < len(data) / 4
    assert num_rejected > 200


@pytest.mark.download
def test_transformers_generates_the_expected_story(stories15m: Path) -> None:
    """Greedy from the beginning-of-text token: the output of llama2.c's own `run` at temperature 0."""
    checkpoint = open_llama2c(stories15m)
    model = llama_in_transformers(checkpoint.header, dict(checkpoint.tensors))
    ids = [1]
    with torch.inference_mode():
        for _ in range(14):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    pieces = tokenizer_pieces(stories15m.with_name("tokenizer.bin"), checkpoint.header.vocab_size)
    text = b"".join(pieces[token] for token in ids[1:]).decode()
    assert text.strip() == "Once upon a time, there was a little girl named Lily."


def llama_in_transformers(header: Llama2cHeader, tensors: dict[str, Tensor]) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=header.width,
        intermediate_size=header.feed_forward_width,
        num_hidden_layers=header.num_layers,
        num_attention_heads=header.num_heads,
        num_key_value_heads=header.num_kv_heads,
        vocab_size=header.vocab_size,
        max_position_embeddings=header.context_length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=header.tied,
    )
    names = {
        "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    state = {
        "model.embed_tokens.weight": tensors["tok_embeddings.weight"],
        "model.norm.weight": tensors["norm.weight"],
        "lm_head.weight": tensors["tok_embeddings.weight"],
    }
    for layer in range(header.num_layers):
        for ours, theirs in names.items():
            tensor = tensors[f"layers.{layer}.{ours}.weight"]
            if ours in ("attention.wq", "attention.wk"):  # transformers pairs feature k with k + H / 2
                tensor = tensor.unflatten(0, (-1, header.head_width // 2, 2)).transpose(1, 2).flatten(0, 2)
            state[f"model.layers.{layer}.{theirs}.weight"] = tensor
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state)
    return model


def tokenizer_pieces(path: Path, vocab_size: int) -> list[bytes]:
    """Read llama2.c's tokenizer.bin: the length of the longest piece, then score, length and bytes of each piece."""
    data, pieces, offset = path.read_bytes(), [], 4
    for _ in range(vocab_size):
        (num_bytes,) = struct.unpack_from("<i", data, offset + 4)
        pieces.append(data[offset + 8 : offset + 8 + num_bytes])
        offset += 8 + num_bytes
    assert offset == len(data)
    assert struct.unpack_from("<i", data) == (max(map(len, pieces)),)
    return pieces

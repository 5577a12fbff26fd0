"""GGUF files that we write: read back by our own reader, by the gguf package and by transformers."""

import dataclasses
import sys

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

import clearhead
from clearhead.api import Model, save_gguf
from clearhead.architecture import Llama3Scaling, Pooling, Rope, SentenceConfig
from clearhead.checkpoint import measure_importance
from clearhead.checkpoint.formats import open_model
from clearhead.checkpoint.gguf import open_gguf
from clearhead.checkpoint.gguf_save import GGUF_FILE_TYPES
from clearhead.checkpoint.gguf_save import save_gguf as write_model
from clearhead.checkpoint.gguf_writer import write_gguf
from clearhead.errors import ClearheadError
from clearhead.model import SentencePooler, Transformer
from clearhead.tokenization import byte_tokenizer, tokenizer_from_gguf, tokenizer_to_gguf, train_tokenizer
from clearhead.tokenization.library_tokenizer import LibraryTokenizer, SpecialTokens
from tests.checkpoint.gguf_toys import toy_network
from tests.checkpoint.test_gguf_model import write_file
from tests.checkpoint.tiny import same_network, tiny_network
from tests.tokenization.samples import wordpiece

TEXT = "The keeper counts 17 lamps. He writes the number down, and it's 3:45 in Zürich. " * 20


@pytest.fixture(scope="module")
def tokenizer():
    trained = train_tokenizer([TEXT], kind="bpe", vocab_size=300)
    trained.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return trained


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "gpt2"])
def test_a_file_written_in_full_precision_is_the_same_model(tmp_path, architecture):
    """Every architecture that can be read is written: read, write, read again."""
    original = open_model(write_file(tmp_path / "theirs.gguf", architecture))
    write_model(
        tmp_path / "ours.gguf", original.network, original.tokenizer, file_type="f16", special_ids=original.special_ids
    )
    again = open_model(tmp_path / "ours.gguf", clearhead.checkpoint.LoadOptions(dtype=torch.float32))
    for name, parameter in original.network.named_parameters():
        stored = parameter.half().float() if parameter.ndim == 2 and "positions" not in name else parameter
        assert torch.equal(again.network.get_parameter(name), stored), name
    assert again.special_ids == original.special_ids == {"eos_token_id": 1}
    theirs, ours = gguf.GGUFReader(tmp_path / "theirs.gguf"), gguf.GGUFReader(tmp_path / "ours.gguf")
    assert {each.name: tuple(each.shape) for each in ours.tensors} == {
        each.name: tuple(each.shape) for each in theirs.tensors
    }
    for key, field in theirs.fields.items():
        if key.startswith(architecture) and "vocab" not in key:
            assert ours.fields[key].contents() == pytest.approx(field.contents()), key


def test_transformers_computes_the_same_logits_from_our_file(tmp_path):
    original = open_model(write_file(tmp_path / "theirs.gguf", "qwen3", tied=False))
    write_model(tmp_path / "ours.gguf", original.network, original.tokenizer, file_type="bf16")
    ours = open_model(tmp_path / "ours.gguf", clearhead.checkpoint.LoadOptions(dtype=torch.float32)).network
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="ours.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.randint(0, 48, (1, 20))
    with torch.no_grad():
        assert (ours(tokens) - theirs.eval()(tokens).logits).abs().max() <= 1e-5


def big_network():
    return tiny_network(width=256, num_layers=4, num_heads=4, feed_forward=512, vocab_size=300, context=128)


TYPES = {  # of the token table (which is the head), value and up projections of layers 0 and 2, and norms
    "q4_k_m": ["Q6_K", "Q4_K", "Q6_K", "Q4_K", "F32"],
    "q5_k_m": ["Q6_K", "Q5_K", "Q6_K", "Q5_K", "F32"],
    "q6_k": ["Q6_K", "Q6_K", "Q6_K", "Q6_K", "F32"],
    "q8_0": ["Q8_0", "Q8_0", "Q8_0", "Q8_0", "F32"],
    "q4_0": ["Q6_K", "Q4_0", "Q4_0", "Q4_0", "F32"],
    "bf16": ["BF16", "BF16", "BF16", "BF16", "F32"],
    "f16": ["F16", "F16", "F16", "F16", "F32"],
}
LARGEST = {"q4_k_m": 0.09, "q5_k_m": 0.05, "q6_k": 0.025, "q8_0": 0.01, "q4_0": 0.11, "bf16": 4e-3, "f16": 5e-4}


@pytest.mark.parametrize("file_type", GGUF_FILE_TYPES)
def test_every_type_is_read_back_with_small_errors_and_the_same_tokens(tmp_path, file_type, tokenizer):
    network = big_network()
    save_gguf(Model(network, tokenizer), tmp_path / "model.gguf", file_type)
    kinds = {name: tensor.block_type.name for name, tensor in open_gguf(tmp_path / "model.gguf").tensors.items()}
    chosen = ("token_embd", "blk.0.attn_v", "blk.2.attn_v", "blk.2.ffn_up", "blk.2.ffn_norm")
    assert [kinds[f"{name}.weight"] for name in chosen] == TYPES[file_type]
    loaded = clearhead.load(tmp_path / "model.gguf", fast=False)
    for name, parameter in loaded.network.named_parameters():
        expected = network.get_parameter(name)
        assert (parameter.float() - expected).norm() <= LARGEST[file_type] * expected.norm(), name
    assert loaded.tokenizer.encode(TEXT) == tokenizer.encode(TEXT)
    assert loaded.tokenizer.chat_template == tokenizer.chat_template
    assert loaded.tokenizer.eos_id == tokenizer.eos_id
    assert gguf.GGUFReader(tmp_path / "model.gguf").fields["general.file_type"].contents() in list(gguf.LlamaFileType)


def test_rows_that_are_no_multiple_of_256_get_smaller_blocks(tmp_path):
    network = tiny_network(width=64, num_heads=4, feed_forward=256 + 32, vocab_size=40)
    write_model(tmp_path / "model.gguf", network, None, file_type="q4_k_m")
    kinds = {name: tensor.block_type.name for name, tensor in open_gguf(tmp_path / "model.gguf").tensors.items()}
    assert kinds["blk.0.attn_q.weight"] == "Q5_0"
    assert kinds["token_embd.weight"] == "Q8_0"
    write_model(tmp_path / "narrow.gguf", tiny_network(), None, file_type="q4_0")
    assert open_gguf(tmp_path / "narrow.gguf").tensors["blk.0.attn_q.weight"].block_type.name == "F16"


def test_llama3_scaling_is_written_as_a_tensor(tmp_path):
    scaling = Llama3Scaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=8192)
    rope = Rope(theta=500000.0, scaling=scaling)
    network = tiny_network(rope=rope, width=64)
    write_model(tmp_path / "model.gguf", network, None, file_type="f16")
    loaded = open_model(tmp_path / "model.gguf").network.config
    assert loaded.decoder.layers[0].attention.position == rope
    with pytest.raises(ClearheadError, match="cannot express the rotary scaling"):
        write_model(tmp_path / "model.gguf", tiny_network(rope=rope), None)  # no frequency is low enough to be scaled


def test_a_calibration_text_reduces_the_error_of_the_outputs(tmp_path, tokenizer):
    """Some columns of the input are large, as in real models; rounding must spare them."""
    network = big_network()
    with torch.no_grad():
        network.decoder.layers[0].attention_residual.norm.weight[::16] *= 30
    model, errors = Model(network, tokenizer), []
    tokens = torch.tensor([tokenizer.encode(TEXT)[:100]])
    expected = network.decoder.layers[0].attention.query(
        network.decoder.layers[0].attention_residual.norm(network.decoder.embedding(tokens, None, None))
    )
    for text in (None, TEXT):
        save_gguf(model, tmp_path / "model.gguf", "q4_0", calibration_text=text)
        layer = clearhead.load(tmp_path / "model.gguf", fast=False).network.decoder.layers[0]
        with torch.no_grad():
            normed = network.decoder.layers[0].attention_residual.norm(network.decoder.embedding(tokens, None, None))
            errors.append(float((layer.attention.query(normed) - expected).norm()))
    assert errors[1] < 0.9 * errors[0]


def test_importance_is_the_mean_square_of_the_inputs():
    network = tiny_network()
    tokens = torch.randint(0, 31, (100,))
    inputs = []
    down = network.decoder.layers[1].feed_forward.down
    hook = down.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad():
        for part in tokens.split(64):
            hidden = network.hidden_states(part[None])
    hook.remove()
    importance = measure_importance(network, tokens.tolist())
    mean = torch.cat([each[0] for each in inputs]).square().mean(0)
    torch.testing.assert_close(importance["decoder.layers.1.feed_forward.down.weight"], mean)
    assert importance["decoder.embedding.tokens.weight"].shape == hidden.shape[-1:]
    assert not down._forward_pre_hooks
    with pytest.raises(ClearheadError, match="has 10 tokens; give one with at least 64"):
        measure_importance(network, [1] * 10)


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    write_model(path, tiny_network(), None)
    before = path.read_bytes()
    monkeypatch.setattr("clearhead.checkpoint.gguf_save.quantize", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_model(path, tiny_network(seed=1), None)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["model.gguf"]


def test_what_gguf_cannot_express_is_refused(tmp_path, tokenizer):
    config = tiny_network().config
    with pytest.raises(ClearheadError, match="unknown GGUF type 'q4km'; did you mean 'q4_k_m'"):
        write_model(tmp_path / "model.gguf", tiny_network(), None, file_type="q4km")
    scaled = dataclasses.replace(config, head=dataclasses.replace(config.head, softcap=30.0))
    with pytest.raises(ClearheadError, match=r"expresses this model .*; use --to huggingface"):
        write_model(tmp_path / "model.gguf", clearhead.create(scaled).network, None)
    with pytest.raises(ClearheadError, match="packed weights cannot be written"):
        write_model(tmp_path / "model.gguf", clearhead.backends.pack_network(tiny_network(), "int8"), None)
    with pytest.raises(ClearheadError, match="300 tokens, but the model only 31"):
        write_model(tmp_path / "model.gguf", tiny_network(), tokenizer)
    with pytest.raises(ClearheadError, match="unsupported extension"):
        save_gguf(Model(tiny_network()), tmp_path / "model.bin")
    assert not list(tmp_path.iterdir())


# --- tokenizers


def test_a_tokenizer_that_splits_in_an_unknown_way_is_refused():
    library = tokenizers.Tokenizer(models.BPE({chr(n): n for n in range(33, 127)} | {"ab": 127}, [("a", "b")]))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("x", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    library.decoder = tokenizers.decoders.ByteLevel()
    with pytest.raises(ClearheadError, match="has no name for"):
        tokenizer_to_gguf(LibraryTokenizer(library, SpecialTokens()), 200)
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ClearheadError, match="type WordLevel cannot be written"):
        tokenizer_to_gguf(LibraryTokenizer(library, SpecialTokens()), 200)


def test_a_tokenizer_of_bytes_keeps_its_tokens():
    """Without merges it does not matter how a text is split, so every name of llama.cpp will do."""
    tokenizer = byte_tokenizer()
    metadata = tokenizer_to_gguf(tokenizer, 257)
    assert (metadata["tokenizer.ggml.pre"], metadata["tokenizer.ggml.merges"]) == ("gpt-2", [])
    again = tokenizer_from_gguf(metadata)
    for text in (TEXT, "日本\x00 it's 1234<|endoftext|>\n\n"):
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))


def test_a_tiny_model_is_converted_with_its_tokenizer(tmp_path):
    model = clearhead.create("gemma-3-1b", byte_tokenizer(), tiny=True)
    again = clearhead.load(save_gguf(model, tmp_path / "tiny.gguf", "f16"))
    assert again.config == model.config
    assert again.generate("Zürich", max_new_tokens=8).tokens == model.generate("Zürich", max_new_tokens=8).tokens


def test_a_sentencepiece_tokenizer_keeps_its_tokens():
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlorwt", "▁t", "he"]
    pieces += ["▁the", "lo", "wor", "▁wor", "or"]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(-n) for n in range(len(pieces) - 259)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }
    original = tokenizer_from_gguf(metadata)
    again = tokenizer_from_gguf(tokenizer_to_gguf(original, len(pieces) + 5))
    for text in ("the world or hello", "  two", "ü🙂", "</s>the"):
        assert again.encode(text) == original.encode(text)
        assert again.decode(again.encode(text)) == original.decode(original.encode(text))
    assert again.vocab_size == len(pieces) + 5


def test_an_encoder_keeps_its_wordpiece_tokenizer_and_its_pooling(tmp_path):
    """The first token of a text is its vector; without the key it would be the mean."""
    tokenizer = LibraryTokenizer(wordpiece(), SpecialTokens(pad="[PAD]", unknown="[UNK]"))
    network = toy_network("bert")
    config = dataclasses.replace(network.config.encoder.embedding, vocab_size=500)
    encoder = dataclasses.replace(network.config.encoder, embedding=config)
    network = Transformer(dataclasses.replace(network.config, encoder=encoder, pooler=True)).eval()
    pooler = SentencePooler(SentenceConfig(width=64, pooling=Pooling(modes=("cls",))))
    model = Model(network, tokenizer, sentence=pooler)
    save_gguf(model, tmp_path / "model.gguf", "f16")
    again = clearhead.load(tmp_path / "model.gguf", dtype="float32", fast=False)
    for text in ("The keeper counts 17 lamps.", "Zürich, naïve café", "東京 unaffable!?"):
        assert again.tokenizer.encode(text) == tokenizer.encode(text)
    assert again.sentence.config.pooling.modes == ("cls",)
    vectors = [each.embed(["The keeper counts lamps.", "a"]) for each in (model, again)]
    torch.testing.assert_close(vectors[0], vectors[1], rtol=1e-2, atol=2e-3)
    largest = Model(network, tokenizer, sentence=SentencePooler(SentenceConfig(pooling=Pooling(modes=("max",)))))
    with pytest.raises(ClearheadError, match="cannot express how this model pools"):
        save_gguf(largest, tmp_path / "other.gguf", "f16")


def test_a_tokenizer_whose_meaning_would_change_is_refused(tokenizer):
    library = tokenizers.Tokenizer.from_str(tokenizer.portable_json())
    library.normalizer = normalizers.Lowercase()
    with pytest.raises(ClearheadError, match="no name for"):
        tokenizer_to_gguf(LibraryTokenizer(library, SpecialTokens()), 400)
    library.normalizer = None
    library.post_processor = tokenizers.processors.TemplateProcessing(single="$A a a", special_tokens=[("a", 64)])
    with pytest.raises(ClearheadError, match="cannot express this tokenizer"):
        tokenizer_to_gguf(LibraryTokenizer(library, SpecialTokens()), 400)


# --- the writer

VALUES = st.one_of(
    st.text(max_size=20),
    st.booleans(),
    st.integers(0, 2**31 - 1),
    st.floats(width=32, allow_nan=False),
    st.lists(st.text(max_size=5), max_size=5),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=1, max_size=3),
)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.text("abc._", min_size=1, max_size=12), VALUES, max_size=6))
def test_any_metadata_is_read_back(tmp_path_factory, metadata):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, metadata, [])
    stored = open_gguf(path).metadata
    assert stored.keys() == metadata.keys()
    for key, value in metadata.items():
        actual = stored[key].tolist() if isinstance(stored[key], np.ndarray) else stored[key]
        assert (list(actual) if isinstance(value, list) else actual) == value


def test_the_command_writes_a_file_that_loads(tmp_path, capsys, monkeypatch, tokenizer):
    from clearhead.cli import main

    network = tiny_network(vocab_size=300)
    Model(network, tokenizer).save(tmp_path / "model")
    (tmp_path / "book.txt").write_text(TEXT)
    arguments = ["convert", str(tmp_path / "model"), str(tmp_path / "out.gguf"), "--to", "gguf", "--type", "f16"]
    monkeypatch.setattr(
        sys, "argv", ["clearhead", *arguments, "--calibration-text", str(tmp_path / "book.txt"), "--json"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    assert '"type": "f16"' in capsys.readouterr().out
    halved = open_model(tmp_path / "out.gguf", clearhead.checkpoint.LoadOptions(dtype=torch.float16)).network
    assert same_network(halved, network.half())

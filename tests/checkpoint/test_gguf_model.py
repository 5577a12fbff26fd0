"""Models in GGUF files of all supported architectures, written by the gguf package and compared with transformers."""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import torch
import transformers

from clearhead.architecture import Llama3Scaling
from clearhead.backends.modules import PackedMatrix
from clearhead.checkpoint import gguf_model
from clearhead.checkpoint.formats import open_model
from clearhead.checkpoint.gguf import GgufFile, open_gguf
from clearhead.checkpoint.gguf_model import load_gguf
from clearhead.checkpoint.huggingface import save_folder
from clearhead.checkpoint.interface import LoadOptions
from clearhead.errors import ClearheadError
from tests.checkpoint.tiny import tiny_network

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, INNER, CONTEXT = 48, 64, 2, 4, 2, 96, 64
# For qwen3 and gemma3, transformers takes the head width from its class, not from the file.
HEAD_WIDTHS = {"llama": 16, "qwen2": 16, "qwen3": 128, "gemma3": 256, "gpt2": 16}
GPT2_BLOCK = {
    "attn_norm.weight": (WIDTH,),
    "attn_norm.bias": (WIDTH,),
    "attn_qkv.weight": (3 * WIDTH, WIDTH),
    "attn_qkv.bias": (3 * WIDTH,),
    "attn_output.weight": (WIDTH, WIDTH),
    "attn_output.bias": (WIDTH,),
    "ffn_norm.weight": (WIDTH,),
    "ffn_norm.bias": (WIDTH,),
    "ffn_up.weight": (4 * WIDTH, WIDTH),
    "ffn_up.bias": (4 * WIDTH,),
    "ffn_down.weight": (WIDTH, 4 * WIDTH),
    "ffn_down.bias": (WIDTH,),
}


def block_of(architecture):
    """Return the shapes of the tensors of one layer by their names."""
    if architecture == "gpt2":
        return GPT2_BLOCK
    head = HEAD_WIDTHS[architecture]
    rows, key_rows = HEADS * head, KV_HEADS * head
    block = {
        "attn_norm.weight": (WIDTH,),
        "attn_q.weight": (rows, WIDTH),
        "attn_k.weight": (key_rows, WIDTH),
        "attn_v.weight": (key_rows, WIDTH),
        "attn_output.weight": (WIDTH, rows),
        "ffn_norm.weight": (WIDTH,),
        "ffn_gate.weight": (INNER, WIDTH),
        "ffn_up.weight": (INNER, WIDTH),
        "ffn_down.weight": (WIDTH, INNER),
    }
    if architecture == "qwen2":
        block |= {"attn_q.bias": (rows,), "attn_k.bias": (key_rows,), "attn_v.bias": (key_rows,)}
    if architecture in ("qwen3", "gemma3"):
        block |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
    if architecture == "gemma3":
        block |= {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
    return block


def random_tensor(name, shape):
    if len(shape) == 2:
        return torch.randn(shape) * shape[1] ** -0.5
    return float("norm.weight" in name) + 0.3 * torch.randn(shape)


def write_file(path, architecture, *, tied=True, kind=gguf.GGMLQuantizationType.F32, extra=None):
    """Write a small model with random weights; matrices are stored as `kind`."""
    torch.manual_seed(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(7 if architecture == "gemma3" else LAYERS)
    writer.add_feed_forward_length(4 * WIDTH if architecture == "gpt2" else INNER)
    writer.add_head_count(HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(VOCAB)])
    writer.add_token_merges([])
    writer.add_eos_token_id(1)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(1e-3)
    else:
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-3)
        writer.add_rope_freq_base(1e6 if architecture == "gemma3" else 5000.0)
        writer.add_key_length(HEAD_WIDTHS[architecture])
        writer.add_value_length(HEAD_WIDTHS[architecture])
    if architecture == "gemma3":
        writer.add_sliding_window(5)
    shapes = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    if architecture == "gpt2":
        shapes |= {"position_embd.weight": (CONTEXT, WIDTH), "output_norm.bias": (WIDTH,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, WIDTH)
    for layer in range(7 if architecture == "gemma3" else LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block_of(architecture).items()}
    tensors = {name: random_tensor(name, shape) for name, shape in shapes.items()}
    for name, tensor in (tensors | (extra or {})).items():
        data = tensor.numpy()
        if tensor.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "gpt2"])
def test_logits_equal_those_of_transformers(tmp_path, architecture, tied):
    if architecture in ("gpt2", "gemma3") and not tied:
        pytest.skip("always tied")
    path = write_file(tmp_path / "model.gguf", architecture, tied=tied)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    network = load_gguf(path).network
    tokens = torch.randint(0, VOCAB, (2, 20))
    with torch.no_grad():
        assert (network(tokens) - theirs(tokens).logits).abs().max() <= 1e-5


def neighbors(rows, num_heads):
    """Reorder rotary halves as neighboring pairs, as llama.cpp's converter does for weights and biases."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def test_a_llama_with_biases(tmp_path):
    """transformers does not read biases from GGUF files, so the file is written from its model."""
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": INNER}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rope_theta": 5000.0, "rms_norm_eps": 1e-3}
    config = transformers.LlamaConfig(**sizes, **heads, attention_bias=True, mlp_bias=True)
    theirs = transformers.LlamaForCausalLM(config).eval()
    names, tensors = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS), {}
    for name, tensor in theirs.state_dict().items():
        tensor = tensor.copy_(random_tensor(name, tensor.shape))
        num_heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        tensors[names.get_name(name, (".weight", ".bias"))] = neighbors(tensor, num_heads) if num_heads else tensor
    network = load_gguf(write_file(tmp_path / "model.gguf", "llama", extra=tensors)).network
    tokens = torch.randint(0, VOCAB, (2, 20))
    with torch.no_grad():
        assert (network(tokens) - theirs(tokens).logits).abs().max() <= 1e-5


def test_a_gpt2_that_stores_the_token_table_also_as_output_matrix(tmp_path):
    """Some converters write such files."""
    path = write_file(tmp_path / "once.gguf", "gpt2")
    tied = load_gguf(path).network
    table = tied.decoder.embedding.tokens.weight.detach()
    twice = load_gguf(write_file(tmp_path / "twice.gguf", "gpt2", extra={"output.weight": table})).network
    other = load_gguf(write_file(tmp_path / "other.gguf", "gpt2", extra={"output.weight": 2 * table})).network
    tokens = torch.randint(0, VOCAB, (2, 20))
    with torch.no_grad():
        assert torch.equal(twice(tokens), tied(tokens))
        assert torch.equal(other(tokens), 2 * tied(tokens))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_every_block_type_can_be_loaded(tmp_path, kind):
    """The weights equal those that the gguf package dequantizes."""
    path = write_file(tmp_path / "model.gguf", "qwen3", kind=gguf.GGMLQuantizationType[kind])
    network = load_gguf(path).network
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["blk.1.ffn_up.weight"]
    expected = torch.tensor(gguf.quants.dequantize(stored.data, stored.tensor_type))
    up = network.decoder.layers[1].feed_forward.up.weight
    assert up.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert torch.equal(up.float(), expected)


def test_loading_reports_the_number_of_tensors_first_and_reads_each_once(tmp_path, monkeypatch):
    path, names, reports = write_file(tmp_path / "model.gguf", "llama"), [], []
    read = GgufFile.read
    monkeypatch.setattr(GgufFile, "read", lambda file, name: names.append(name) or read(file, name))
    num_threads = torch.get_num_threads()
    progress = lambda name, done, total: reports.append((done, total, torch.get_num_threads()))  # noqa: E731
    load_gguf(path, LoadOptions(progress=progress))
    assert reports[0][:2] == (0, len(gguf.GGUFReader(path).tensors))
    assert {threads for _, _, threads in reports[1:]} == {1}
    assert torch.get_num_threads() == num_threads
    assert len(names) == len(set(names))


STORED_TYPES = ("Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1", "MXFP4")  # of 32 values, that the gguf package can write


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("kind", STORED_TYPES)
def test_stored_weights_are_never_dequantized(tmp_path, monkeypatch, architecture, kind):
    """Matrices keep the values of the file, also those whose rows are reordered (llama) or split (gpt2)."""
    path = write_file(tmp_path / "model.gguf", architecture, tied=False, kind=gguf.GGMLQuantizationType[kind])
    full = load_gguf(path).network
    names, read, headers = [], GgufFile.read, []
    monkeypatch.setattr(GgufFile, "read", lambda file, name: names.append(name) or read(file, name))
    monkeypatch.setattr(gguf_model, "open_gguf", lambda path: headers.append(path) or open_gguf(path))
    loaded = open_model(path, LoadOptions(dtype=torch.float32, weights="stored"))
    assert {name for name in names if "norm" not in name and "bias" not in name} == set()
    assert headers == [path], "config, weights and tokenizer share one header"
    assert loaded.tokenizer is not None
    packed = {name: part for name, part in loaded.network.named_modules() if isinstance(part, PackedMatrix)}
    num_matrices = {"llama": 7, "qwen2": 7, "gpt2": 6}[architecture]
    assert len(packed) == LAYERS * num_matrices + 2
    for name, matrix in packed.items():
        own_name = name if name == "head.weight" else f"{name}.weight"
        assert torch.equal(matrix.packed.unpack(), full.get_parameter(own_name).detach()), name
    for name, parameter in loaded.network.named_parameters():
        assert torch.equal(parameter, full.get_parameter(name)), name


@pytest.mark.parametrize(
    ("scale", "dtype", "message"),
    [
        (math.nan, torch.bfloat16, r"blk\.1\.ffn_up\.weight holds NaN or infinite numbers; the file is damaged"),
        (math.inf, torch.float32, "holds NaN or infinite numbers"),
        (60000.0, torch.float16, "too large for torch.float16; give a wider dtype"),
        (60000.0, torch.bfloat16, None),
        (5000.0, torch.float16, None),
    ],
)
def test_stored_weights_are_checked_like_full_ones(tmp_path, scale, dtype, message):
    """Blocks of Q4_0 hold scale * (q - 8); 5000 * 8 is within float16 though the bound, 5000 * 128, is not."""
    kind = gguf.GGMLQuantizationType.Q4_0
    path = write_file(tmp_path / "model.gguf", "llama", kind=kind)
    tensor = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["blk.1.ffn_up.weight"]
    with path.open("r+b") as file:
        file.seek(int(tensor.data_offset))
        file.write(np.float16(scale).tobytes())
    for weights in ("full", "stored"):
        options = LoadOptions(dtype=dtype, weights=weights)
        if message is None:
            load_gguf(path, options)
        else:
            with pytest.raises(ClearheadError, match=message):
                load_gguf(path, options)


@pytest.mark.parametrize("weights", ["full", "stored"])
@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "blk.1.ffn_down.weight"])
def test_the_error_names_a_tensor_of_the_wrong_shape(tmp_path, name, weights):
    wrong = {name: torch.randn(40, WIDTH)}
    path = write_file(tmp_path / "model.gguf", "llama", kind=gguf.GGMLQuantizationType.Q8_0, extra=wrong)
    with pytest.raises(ClearheadError, match=rf"{name} has shape \(40, 64\); the config needs \(64, "):
        load_gguf(path, LoadOptions(weights=weights))


def test_concurrent_loads_restore_the_number_of_threads(tmp_path):
    path, inside = write_file(tmp_path / "model.gguf", "llama"), threading.Event()

    def load_slowly(num_seconds):
        def wait(name, done, total):
            if done == 1:
                inside.set()
                time.sleep(num_seconds)

        load_gguf(path, LoadOptions(progress=wait))

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        first, second = (threading.Thread(target=load_slowly, args=[pause]) for pause in (0.1, 0.3))
        first.start()
        inside.wait()
        second.start()
        first.join()
        second.join()
        with ThreadPoolExecutor(1) as pool:  # a new thread starts with the number that any thread set last
            assert pool.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


def test_a_gguf_file_saved_as_a_hugging_face_folder(tmp_path):
    """Rotary pairs are neighboring rows in the file and halves in the folder."""
    loaded = load_gguf(write_file(tmp_path / "model.gguf", "llama", tied=False))
    save_folder(loaded.network, tmp_path / "folder", loaded.family)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    tokens = torch.randint(0, VOCAB, (2, 20))
    with torch.no_grad():
        assert (loaded.network(tokens) - theirs(tokens).logits).abs().max() <= 1e-5


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_stored_as_a_tensor(tmp_path, factor):
    """Converters write Llama 3's scaling as divisors of the frequencies (`rope_freqs`)."""
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters = {"rope_type": "llama3", "rope_theta": 5000.0, "original_max_position_embeddings": 8192} | scaling
    config = transformers.LlamaConfig(
        rope_parameters=parameters, head_dim=16, hidden_size=WIDTH, num_attention_heads=HEADS
    )
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    divisors = 1 / 5000.0 ** (torch.arange(0, 16, 2) / 16) / scaled
    path = write_file(tmp_path / "model.gguf", "llama", extra={"rope_freqs.weight": divisors})
    rope = load_gguf(path).network.config.decoder.layers[0].attention.position
    assert rope.scaling == Llama3Scaling(
        factor=factor, low_frequency_factor=1.0, high_frequency_factor=4.0, original_context=8192
    )
    wrong = write_file(tmp_path / "wrong.gguf", "llama", extra={"rope_freqs.weight": torch.rand(8) + 1})
    with pytest.raises(ClearheadError, match="not Llama 3's"):
        load_gguf(wrong)


def test_the_error_names_an_unknown_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "lama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ClearheadError, match="the architecture 'lama' are not supported; supported are"):
        load_gguf(tmp_path / "model.gguf")


def test_the_error_names_a_missing_tensor(tmp_path):
    path = write_file(tmp_path / "model.gguf", "llama")
    data = path.read_bytes().replace(b"blk.1.attn_v.weight", b"blk.1.attn_x.weight")
    path.write_bytes(data)
    with pytest.raises(ClearheadError, match=r"lacks the tensor blk\.1\.attn_v\.weight"):
        load_gguf(path)


def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path, monkeypatch):
    for name in ("add_tokenizer_model", "add_token_list", "add_token_merges"):
        monkeypatch.setattr(gguf.GGUFWriter, name, lambda writer, value: None)
    loaded = open_model(write_file(tmp_path / "model.gguf", "llama"))
    assert loaded.tokenizer is None
    assert loaded.special_ids == {"eos_token_id": 1}


def test_a_safetensors_file_is_not_a_gguf_file(tmp_path):
    save_folder(tiny_network(), tmp_path)
    with pytest.raises(ClearheadError, match="GGUF"):
        load_gguf(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.rope.dimension_count", 8, "8 of 16 entries of a head are rotated"),
        ("llama.attention.sliding_window", 32, "'llama.attention.sliding_window' is 32"),
        ("llama.logit_scale", 0.5, "'llama.logit_scale' is 0.5"),
        ("llama.final_logit_softcapping", 30.0, "'llama.final_logit_softcapping' is 30.0"),
        ("llama.rope.scaling.attn_factor", 1.5, "'llama.rope.scaling.attn_factor' is 1.5"),
        ("llama.attention.causal", False, "'llama.attention.causal' is False"),
        ("llama.logit_scale", np.array([1.0, 2.0]), r"'llama.logit_scale' is \[1.0, 2.0\]"),
        ("llama.rope.scaling.type", np.array([1, 2]), r"'llama.rope.scaling.type' must be a string, not \[1, 2\]"),
    ],
)
def test_unsupported_metadata_is_rejected(key, value, message):
    from clearhead.families import gguf_settings

    metadata = {"general.architecture": "llama", "llama.embedding_length": 64, "llama.attention.head_count": 4}
    gguf_settings(metadata, {}, "model.gguf")
    with pytest.raises(ClearheadError, match=message):
        gguf_settings(metadata | {key: value}, {}, "model.gguf")


def test_a_scaling_factor_without_a_type_is_linear():
    """As in llama.cpp, also under the older key."""
    from clearhead.families import gguf_settings

    for key, kind in (("rope.scaling.factor", "linear"), ("rope.scale_linear", "linear"), ("rope.scaling.type", None)):
        metadata = {"general.architecture": "llama", f"llama.{key}": "linear" if kind is None else 4.0}
        scaling = gguf_settings(metadata, {}, "model.gguf").object("rope_scaling").data
        assert (scaling.get("rope_type"), scaling.get("factor")) == (kind, kind and 4.0)


LINEAR, YARN = ("rope.scaling.type", "linear"), ("rope.scaling.type", "yarn")
FACTOR = ("rope.scaling.factor", 4.0)


@pytest.mark.parametrize(
    ("architecture", "pairs"),
    [
        ("llama", []),
        ("llama", [LINEAR]),
        ("llama", [FACTOR]),
        ("llama", [("rope.scale_linear", 4.0)]),
        ("llama", [LINEAR, FACTOR]),
        ("llama", [("rope.scaling.type", "none"), FACTOR]),
        ("llama", [YARN, FACTOR, ("rope.scaling.original_context_length", 16)]),
        ("gemma3", [LINEAR, FACTOR]),
        ("gemma3", [("rope.freq_base_swa", 77.0)]),
        ("gemma3", [("attention.sliding_window_pattern", 3)]),
    ],
)
def test_metadata_has_the_same_meaning_as_in_llama_cpp(tmp_path, monkeypatch, architecture, pairs):
    """llama.cpp rounds activations to 16 bits. A different meaning would change the logits by more than 1."""
    llama_cpp = pytest.importorskip("llama_cpp")

    def add_merges_and_types(writer, merges):
        gguf.GGUFWriter.add_array(writer, "tokenizer.ggml.merges", ["t0 t1"])  # llama.cpp rejects a file without merges
        writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
        writer.add_tokenizer_pre("gpt-2")
        for key, value in pairs:
            add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            add(f"{architecture}.{key}", value)

    def add_tokens(writer, tokens):
        gguf.GGUFWriter.add_array(writer, "tokenizer.ggml.tokens", [*tokens[:-1], "t0t1"])  # what the merge makes

    monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", add_merges_and_types)
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_list", add_tokens)
    path = write_file(tmp_path / "model.gguf", architecture)
    tokens = torch.randint(0, VOCAB, (20,))
    theirs = llama_cpp.Llama(str(path), n_ctx=CONTEXT, n_threads=1, logits_all=True, verbose=False)
    theirs.eval(tokens.tolist())
    with torch.no_grad():
        ours = load_gguf(path).network(tokens[None])[0]
    assert (ours - torch.tensor(theirs.scores[: len(tokens)])).abs().max() < 0.02
    theirs.close()

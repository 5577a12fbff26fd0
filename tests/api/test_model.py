"""Model, load and create: generating, streaming, embedding, saving; repr and documented options."""

from dataclasses import replace

import pytest
import torch

import clearhead
from clearhead.api import Model, RecurrentBaseline, create, load
from clearhead.backends import accelerate, pack_network
from clearhead.errors import ClearheadError
from clearhead.generation import Generation
from clearhead.model.recurrent import RecurrentConfig, RecurrentTranslator
from clearhead.tokenization.characters import byte_tokenizer
from tests.checkpoint.tiny import same_network, tiny_config, tiny_network

RECURRENT_SIZES = {"source_vocab_size": 9, "target_vocab_size": 9, "embedding_width": 4, "width": 4, "context": 16}


def byte_model():
    tokenizer = byte_tokenizer()
    return create(tiny_config(vocab_size=tokenizer.vocab_size), tokenizer)


def test_create_is_seeded_and_does_not_touch_the_global_generator():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = create(tiny_config(), seed=1), create(tiny_config(), seed=1)
    assert torch.rand(1) == expected
    assert same_network(first.network, second.network)
    assert not torch.equal(
        create(tiny_config(), seed=2).network.decoder.embedding.tokens.weight,
        first.network.decoder.embedding.tokens.weight,
    )


def test_create_does_not_seed_gpus(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    create(tiny_config(), seed=1)
    assert seeded == []


def test_models_compare_by_identity_and_can_be_keys():
    first, second = byte_model(), byte_model()
    assert {first: "first", second: "second"}[first] == "first"
    assert first != second


def test_embeddings_can_be_inputs_of_a_trained_layer():
    vectors = byte_model().embed(["a cat", "a dog"])
    probe = torch.nn.Linear(vectors.shape[1], 1)
    probe(vectors).sum().backward()
    assert torch.allclose(probe.weight.grad[0], vectors.sum(dim=0))


@pytest.mark.parametrize("kind", ["native", "huggingface"])
def test_a_saved_model_generates_the_same_when_loaded(tmp_path, kind):
    model = byte_model()
    model.save(tmp_path / kind, format=kind)
    again = load(tmp_path / kind)
    assert same_network(again.network, model.network)
    assert again.generate("Hi", max_new_tokens=12).tokens == model.generate("Hi", max_new_tokens=12).tokens


def test_greedy_decoding_takes_the_argmax_of_a_full_forward_pass():
    model = Model(tiny_network())
    generation = model.generate([1, 2, 3], max_new_tokens=10)
    tokens = [1, 2, 3]
    for token in generation.tokens:
        with torch.no_grad():
            assert token == int(model.network(torch.tensor([tokens]))[0, -1].argmax())
        tokens.append(token)
    assert generation.finish_reason == "length"


def test_a_stop_token_ends_the_text():
    free = Model(tiny_network()).generate([1, 2, 3], max_new_tokens=10)
    stopped = Model(tiny_network(), special_ids={"eos_token_id": free.tokens[4]}).generate([1, 2, 3], max_new_tokens=10)
    cut = free.tokens.index(free.tokens[4]) + 1
    assert stopped.tokens == free.tokens[:cut]
    assert stopped.finish_reason == "stop"


def test_sampling_is_seeded():
    model = Model(tiny_network())
    texts = [model.generate([1], max_new_tokens=20, temperature=1.0, seed=seed).tokens for seed in (0, 0, 1)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_the_pieces_of_a_stream_are_the_generated_text():
    model = byte_model()
    assert "".join(model.stream("Hello", max_new_tokens=20)) == model.generate("Hello", max_new_tokens=20).text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.generate("hi"), "has no tokenizer"),
        (lambda m: m.generate([]), "text is empty"),
        (lambda m: m.generate([99]), "token id 99 is out of range"),
        (lambda m: m.generate([1], max_new_tokens=-1), "max_new_tokens is -1"),
        (lambda m: m.generate([1], temperature=-1), "temperature is -1"),
        (lambda m: m.generate([1], temprature=1), "did you mean 'temperature'"),
        (lambda m: m.stream([1], n=2), "generate and stream return one text"),
        (lambda m: m.save("x", format="pickle"), "unknown format 'pickle'"),
    ],
)
def test_invalid_calls_raise_one_sentence(call, message):
    with pytest.raises(ClearheadError, match=message):
        call(Model(tiny_network()))


def test_a_recurrent_network_has_the_same_default_length():
    network = RecurrentTranslator(RecurrentConfig(cell="gru", attention="none", **RECURRENT_SIZES)).eval()
    model = RecurrentBaseline(network, special_ids={"decoder_start_token_id": 1, "eos_token_id": -1})
    assert len(model.generate([3]).tokens) == len(create(tiny_config()).generate([3]).tokens) == 128


def test_a_model_without_a_head_cannot_generate_or_score():
    model = create(replace(tiny_config(), head=None), byte_tokenizer())
    for call in (model.generate, model.score):
        with pytest.raises(ClearheadError, match="has no head"):
            call("abc")


def test_unknown_names_suggest_the_nearest_one():
    with pytest.raises(ClearheadError, match="did you mean 'gpt2'"):
        create("gtp2")
    with pytest.raises(ClearheadError, match="did you mean 'bfloat16'"):
        load("smollm2", dtype="bfloat1")
    with pytest.raises(ClearheadError, match="is a preset"):
        load("llama-3.1-8b")


def test_a_hub_id_without_a_network_raises(monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", True
    )  # the environment variable is read only at import
    with pytest.raises(ClearheadError, match="could not be fetched from the Hugging Face Hub"):
        load("someone/some-model-that-is-not-here")


def test_a_path_that_does_not_exist_and_cannot_be_a_hub_id_raises():
    with pytest.raises(
        ClearheadError, match="läufe/erster does not exist, and cannot be the name of a model on the Hub"
    ):
        load("läufe/erster")


def test_the_public_names_are_those_of_the_api_package():
    assert clearhead.load is load
    assert clearhead.Model is Model


def test_a_folder_keeps_its_format(tmp_path):
    """Files of the other format would be loaded instead of the new ones."""
    model = Model(tiny_network())
    model.save(tmp_path, format="native")
    with pytest.raises(ClearheadError, match="contains a model in another format"):
        model.save(tmp_path, format="huggingface")
    model.save(tmp_path, format="native")


def test_empty_inputs():
    with pytest.raises(ClearheadError, match="has no tokenizer"):
        Model(tiny_network()).generate([1], stop=["x"])
    with pytest.raises(ClearheadError, match="the text is empty"):
        byte_model().embed(["abc", ""])
    with pytest.raises(ClearheadError, match="there is no text to embed"):
        byte_model().embed([])


def test_generate_many_of_an_empty_list_returns_an_empty_list():
    assert Model(tiny_network()).generate_many([]) == []
    assert Model(tiny_network()).generate_many([], beams=2) == []


def test_an_unknown_device_raises(tmp_path):
    Model(tiny_network()).save(tmp_path)
    for name in ("cuda:99", "gpu"):
        with pytest.raises(ClearheadError, match="is not available on this machine; use cpu"):
            load(tmp_path, device=name)


def test_repr_shows_family_size_dtype_device_and_what_runs_it():
    network = tiny_network()
    count = sum(parameter.numel() for parameter in network.parameters())
    assert repr(Model(network)) == f"Model(custom, {count:,} parameters, float32, cpu, PyTorch)"
    packed = repr(Model(pack_network(tiny_network(), "int4")))
    assert packed == f"Model(custom, {count:,} parameters, float32 with packed weights, cpu, PyTorch)"
    html = Model(network)._repr_html_()
    assert f"<tr><th>parameters</th><td>{count:,} parameters</td></tr>" in html


def test_repr_names_the_cpu_kernels():
    network = tiny_network()
    try:
        accelerate(network)
    except ClearheadError as error:
        pytest.skip(str(error))
    assert repr(Model(network)).endswith(", cpu, CPU kernels)")


def test_repr_of_a_recurrent_network():
    network = RecurrentTranslator(RecurrentConfig(cell="gru", attention="none", **RECURRENT_SIZES)).eval()
    assert repr(RecurrentBaseline(network)).startswith("RecurrentBaseline(custom, ")


def test_repr_of_a_generation_and_a_stream():
    generation = Generation([5, 6], "a < b\n", [1, 2, 3], "stop", score=-0.25)
    assert repr(generation) == "Generation('a < b\\n', 2 new tokens after 3 prompt tokens, stop, score -0.2500)"
    assert "a &lt; b" in generation._repr_html_()
    long = replace(generation, text="x" * 100, num_past_context=4, score=None)
    summary = "2 new tokens after 3 prompt tokens, stop, 4 tokens past the context"
    assert repr(long) == f"Generation('{'x' * 59}…', {summary})"
    stream = byte_model().stream("Hello", max_new_tokens=2)
    next(stream)
    assert repr(stream).startswith("Stream('")
    assert repr(stream).endswith(", 1 new tokens after 5 prompt tokens, unfinished)")


@pytest.mark.parametrize(
    ("kind", "names"),
    [("native", ("weights.safetensors", "clearhead.json")), ("huggingface", ("model.safetensors", "config.json"))],
)
def test_all_saved_files_have_the_same_permissions(tmp_path, kind, names):
    Model(tiny_network()).save(tmp_path, format=kind)
    assert len({(tmp_path / name).stat().st_mode for name in names}) == 1


def test_create_takes_dtype_and_device():
    model = create(tiny_config(), dtype="bfloat16", device="cpu")
    assert {parameter.dtype for parameter in model.network.parameters()} == {torch.bfloat16}
    same = create(tiny_config()).network.to(torch.bfloat16)
    pairs = zip(model.network.parameters(), same.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    with pytest.raises(ClearheadError, match="is not available on this machine; use cpu"):
        create(tiny_config(), device="cuda:99")
    for unknown in ("float23", torch.int8, torch.complex64, 32):
        with pytest.raises(ClearheadError, match="unknown dtype"):
            create(tiny_config(), dtype=unknown)


def test_the_public_names_of_model():
    names = {name for name in dir(Model) if not name.startswith("_")}
    fields = {
        "family",
        "folder",
        "labels",
        "network",
        "sentence",
        "special_ids",
        "speech",
        "tokenizer",
        "use_cuda_graph",
    }
    assert names - fields == {
        "ask",
        "chat",
        "classify",
        "config",
        "device",
        "dtype",
        "embed",
        "encode",
        "encode_chat",
        "engine",
        "export",
        "generate",
        "generate_many",
        "has_chat_template",
        "rerank",
        "run_with_cache",
        "run_with_hooks",
        "save",
        "score",
        "text_generator",
        "stream",
        "to",
        "to_huggingface",
        "trace",
        "transcribe",
    }


def test_to_moves_and_converts_in_place():
    model = byte_model()
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    expected = model.generate("Hello", max_new_tokens=8).tokens
    assert model.to(dtype="float64") is model
    assert model.dtype == torch.float64
    assert model.generate("Hello", max_new_tokens=8).tokens == expected
    assert model.to("cpu", torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "bfloat16"}, r"bfloat16 is a dtype; write to\(dtype='bfloat16'\)"),
        ({"device": torch.float16}, r"write to\(dtype='float16'\)"),
        ({"dtype": "float23"}, "unknown dtype"),
        ({"device": "cuda:99"}, "not available on this machine"),
    ],
)
def test_to_rejects_unknown_places(arguments, message):
    with pytest.raises(ClearheadError, match=message):
        byte_model().to(**arguments)


def test_to_keeps_the_kernels_correct(kernels):
    model = byte_model()
    accelerate(model.network)
    assert "CPU kernels" in repr(model)
    expected = model.generate("Hello", max_new_tokens=8).tokens
    assert model.to(dtype="bfloat16").to(dtype="float32").dtype == torch.float32
    fresh = byte_model().to(dtype="bfloat16").to(dtype="float32")
    assert model.generate("Hello", max_new_tokens=8).tokens == fresh.generate("Hello", max_new_tokens=8).tokens
    assert len(expected) == 8


def test_generate_many_shows_how_many_texts_are_finished(capsys):
    model = create(tiny_config())
    model.generate_many([[1, 2], [3]], max_new_tokens=3, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err
    model.generate_many([[1, 2], [3]], max_new_tokens=3)
    assert capsys.readouterr().err == ""

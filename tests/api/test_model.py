"""Model: load, create, generate, stream, embed, save."""

from dataclasses import replace

import pytest
import torch

import clearhead
from clearhead.api import Model, RecurrentBaseline, create, load
from clearhead.backends.packed.modules import pack_network
from clearhead.errors import ClearheadError
from clearhead.model.recurrent import RecurrentConfig, RecurrentTranslator
from clearhead.tokenization.characters import byte_tokenizer
from tests.checkpoint.tiny import same_network, tiny_config, tiny_network


def speaking_model():
    tokenizer = byte_tokenizer()
    return create(tiny_config(vocab_size=tokenizer.vocab_size), tokenizer)


def test_create_is_seeded_and_leaves_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, other = create(tiny_config(), seed=1), create(tiny_config(), seed=1)
    assert torch.rand(1) == expected
    assert same_network(one.network, other.network)
    assert not torch.equal(
        create(tiny_config(), seed=2).network.decoder.embedding.tokens.weight,
        one.network.decoder.embedding.tokens.weight,
    )


def test_create_leaves_the_generators_of_gpus_alone(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    create(tiny_config(), seed=1)
    assert seeded == []


def test_a_model_is_itself_and_can_be_a_key():
    first, second = speaking_model(), speaking_model()
    assert {first: "first", second: "second"}[first] == "first"
    assert first != second


def test_embeddings_can_be_learnt_from():
    vectors = speaking_model().embed(["a cat", "a dog"])
    probe = torch.nn.Linear(vectors.shape[1], 1)
    probe(vectors).sum().backward()
    assert torch.allclose(probe.weight.grad[0], vectors.sum(dim=0))


@pytest.mark.parametrize("kind", ["native", "huggingface"])
def test_saved_and_loaded_speaks_the_same(tmp_path, kind):
    model = speaking_model()
    model.save(tmp_path / kind, format=kind)
    again = load(tmp_path / kind)
    assert same_network(again.network, model.network)
    assert again.generate("Hi", max_new_tokens=12).tokens == model.generate("Hi", max_new_tokens=12).tokens


def test_greedy_is_the_argmax_of_the_whole_forward():
    model = Model(tiny_network())
    made = model.generate([1, 2, 3], max_new_tokens=10)
    tokens = [1, 2, 3]
    for token in made.tokens:
        with torch.no_grad():
            assert token == int(model.network(torch.tensor([tokens]))[0, -1].argmax())
        tokens.append(token)
    assert made.finish_reason == "length"


def test_a_stop_token_ends_it():
    free = Model(tiny_network()).generate([1, 2, 3], max_new_tokens=10)
    stopped = Model(tiny_network(), special_ids={"eos_token_id": free.tokens[4]}).generate([1, 2, 3], max_new_tokens=10)
    cut = free.tokens.index(free.tokens[4]) + 1
    assert stopped.tokens == free.tokens[:cut]
    assert stopped.finish_reason == "stop"


def test_sampling_is_seeded():
    model = Model(tiny_network())
    draws = [model.generate([1], max_new_tokens=20, temperature=1.0, seed=seed).tokens for seed in (0, 0, 1)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


def test_stream_is_the_text():
    model = speaking_model()
    assert "".join(model.stream("Hello", max_new_tokens=20)) == model.generate("Hello", max_new_tokens=20).text


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda m: m.generate("hi"), "has no tokenizer"),
        (lambda m: m.generate([]), "text is empty"),
        (lambda m: m.generate([99]), "token id 99 is out of range"),
        (lambda m: m.generate([1], max_new_tokens=-1), "max_new_tokens is -1"),
        (lambda m: m.generate([1], temperature=-1), "temperature is -1"),
        (lambda m: m.generate([1], temprature=1), "did you mean 'temperature'"),
        (lambda m: m.stream([1], n=2), "a stream is one text"),
        (lambda m: m.save("x", format="pickle"), "unknown format 'pickle'"),
    ],
)
def test_wrong_use_is_one_sentence(call, sentence):
    with pytest.raises(ClearheadError, match=sentence):
        call(Model(tiny_network()))


def test_a_recurrent_network_speaks_as_long_as_any_other():
    sizes = {"source_vocab_size": 9, "target_vocab_size": 9, "embedding_width": 4, "width": 4, "context": 16}
    network = RecurrentTranslator(RecurrentConfig(cell="gru", attention="none", **sizes)).eval()
    model = RecurrentBaseline(network, special_ids={"decoder_start_token_id": 1, "eos_token_id": -1})
    assert len(model.generate([3]).tokens) == len(create(tiny_config()).generate([3]).tokens) == 128


def test_without_a_head_there_is_nothing_to_say():
    model = create(replace(tiny_config(), head=None), byte_tokenizer())
    for call in (model.generate, model.score):
        with pytest.raises(ClearheadError, match="has no head"):
            call("abc")


def test_wrong_names():
    with pytest.raises(ClearheadError, match="did you mean 'gpt2'"):
        create("gtp2")
    with pytest.raises(ClearheadError, match="did you mean 'bfloat16'"):
        load("smollm2", dtype="bfloat1")
    with pytest.raises(ClearheadError, match="is a preset"):
        load("llama-3.1-8b")


def test_an_offline_hub_id_says_what_to_do(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable is read once, at its import
    with pytest.raises(ClearheadError, match="could not be fetched from the hub"):
        load("someone/some-model-that-is-not-here")


def test_public_face():
    assert clearhead.load is load
    assert clearhead.Model is Model


def test_a_folder_keeps_one_format(tmp_path):
    """The other format's files would be loaded in place of the new ones."""
    model = Model(tiny_network())
    model.save(tmp_path, format="native")
    with pytest.raises(ClearheadError, match="holds a model in another format"):
        model.save(tmp_path, format="huggingface")
    model.save(tmp_path, format="native")


def test_empty_and_impossible_requests():
    with pytest.raises(ClearheadError, match="has no tokenizer"):
        Model(tiny_network()).generate([1], stop=["x"])
    with pytest.raises(ClearheadError, match="the text is empty"):
        speaking_model().embed(["abc", ""])
    assert Model(tiny_network()).generate_many([]) == []


def test_a_device_that_is_not_here(tmp_path):
    Model(tiny_network()).save(tmp_path)
    for name in ("cuda:99", "gpu"):
        with pytest.raises(ClearheadError, match="there is no device"):
            load(tmp_path, device=name)


def test_a_model_is_shown_in_one_line():
    shown = repr(Model(tiny_network()))
    assert shown.startswith("Model(own, ")
    packed = repr(Model(pack_network(tiny_network(), "int4")))
    assert packed == shown.replace("float32", "float32 with packed weights")
    assert dir(clearhead) == clearhead.__all__


@pytest.mark.parametrize(
    ("kind", "names"),
    [("native", ("weights.safetensors", "clearhead.json")), ("huggingface", ("model.safetensors", "config.json"))],
)
def test_weights_are_as_readable_as_the_rest(tmp_path, kind, names):
    Model(tiny_network()).save(tmp_path, format=kind)
    assert len({(tmp_path / name).stat().st_mode for name in names}) == 1


def test_create_takes_dtype_and_device():
    model = create(tiny_config(), dtype="bfloat16", device="cpu")
    assert {parameter.dtype for parameter in model.network.parameters()} == {torch.bfloat16}
    same = create(tiny_config()).network.to(torch.bfloat16)
    pairs = zip(model.network.parameters(), same.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    with pytest.raises(ClearheadError, match="there is no device"):
        create(tiny_config(), device="cuda:99")
    for wrong in ("float23", torch.int8, torch.complex64, 32):
        with pytest.raises(ClearheadError, match="unknown dtype"):
            create(tiny_config(), dtype=wrong)


def test_the_face_is_small():
    own = {name for name in dir(Model) if not name.startswith("_")}
    fields = {"family", "in_graph", "network", "special_ids", "tokenizer"}
    assert own - fields == {
        "chat",
        "config",
        "embed",
        "encode",
        "generate",
        "generate_many",
        "save",
        "score",
        "text_generator",
        "stream",
        "trace",
    }

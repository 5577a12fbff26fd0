"""Model.generate with beams, speculation, a full context and little memory; every invalid call raises one sentence."""

import math
import resource
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
import transformers

from clearhead.api import Model, load
from clearhead.architecture import LearnedPositions
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.generation import text_generator
from clearhead.generation.beam import beam_search
from clearhead.generation.prompts import encode_sources, explain_out_of_memory
from clearhead.generation.speculative import PromptLookup
from clearhead.options import BeamOptions
from clearhead.tokenization.characters import byte_tokenizer, character_tokenizer
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import decoder, encoder, toy, translator
from tests.parity.harness import float32_as_float64, load_network, randomize
from tests.toy_presets import shrink

PROMPTS = [[3, 7, 1, 9, 11], [4], [12, 6, 8]]


def byte_model(**changes):
    tokenizer = byte_tokenizer()
    return Model(tiny_network(vocab_size=tokenizer.vocab_size, **changes), tokenizer)


def translation_model():
    return Model(toy(translator()), special_ids={"decoder_start_token_id": 2, "eos_token_id": 5})


# --- beams


def test_beams_of_a_decoder_equal_transformers(tmp_path):
    """Texts, scores and the n best, in float64, so that no order depends on rounding."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    with float32_as_float64():
        torch.manual_seed(0)
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=13, **sizes)).eval()
        randomize(theirs)
        theirs.to(torch.float64)
        result = theirs.generate(
            torch.tensor([PROMPTS[0]]),
            num_beams=4,
            num_return_sequences=3,
            length_penalty=0.6,
            max_new_tokens=9,
            do_sample=False,
            eos_token_id=[5, 1, 8],
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    model = Model(load_network(theirs, tmp_path), special_ids={"eos_token_id": [5, 1, 8]})
    ours = model.generate_many([PROMPTS[0]], n=3, beams=4, length_penalty=0.6, max_new_tokens=9)
    lengths = (result.beam_indices >= 0).sum(dim=1).tolist()
    assert [each.tokens for each in ours] == [
        row[len(PROMPTS[0]) :][:length].tolist() for row, length in zip(result.sequences, lengths, strict=True)
    ]
    assert [each.score for each in ours] == pytest.approx(result.sequences_scores.tolist(), rel=1e-12)
    assert "stop" in {each.finish_reason for each in ours}


def test_beams_of_an_encoder_decoder_equal_beam_search():
    model = translation_model()
    result = model.generate_many(PROMPTS, n=2, beams=3, max_new_tokens=8)
    options = BeamOptions(num_beams=3, num_best=2, max_new_tokens=8, stop_ids=[5])
    expected = beam_search(model.network, [[2]] * 3, options, encode_sources(model.network, PROMPTS))
    assert [each.tokens for each in result] == [beam.tokens for beams in expected for beam in beams]
    assert result[0].prompt_tokens == result[1].prompt_tokens == PROMPTS[0]
    assert model.generate(PROMPTS[1], beams=3, max_new_tokens=8).tokens == result[2].tokens


def test_one_beam_equals_greedy_decoding_and_has_a_text():
    model = byte_model()
    beam = model.generate("Hello", beams=1, max_new_tokens=12)
    greedy = model.generate("Hello", max_new_tokens=12, logprobs=0)
    assert (beam.tokens, beam.text) == (greedy.tokens, greedy.text)
    assert beam.score == pytest.approx(sum(greedy.logprobs) / 12, abs=1e-5)


def test_a_longer_prompt_in_the_batch_does_not_shorten_beams():
    model = Model(toy(shrink(preset("gpt2"))))  # 32 positions
    result = model.generate_many([[1, 2], [3] * 25], beams=2, max_new_tokens=20)
    assert [(len(each.tokens), each.finish_reason) for each in result] == [(20, "length"), (8, "context")]
    assert result[0].tokens == model.generate([1, 2], beams=2, max_new_tokens=20).tokens


# --- speculation


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3, "top_k": 5}], ids=["greedy", "sampled"])
def test_speculation_by_lookup(settings):
    model = byte_model()
    options = {"max_new_tokens": 40} | settings
    result = model.generate("to be to be to", speculate="lookup", **options)
    assert result == model.generate("to be to be to", speculate=PromptLookup(), **options)
    assert "".join(model.stream("to be to be to", speculate="lookup", **options)) == result.text
    if not settings:
        assert result == model.generate("to be to be to", **options)


def test_a_draft_model_does_not_change_the_text():
    model, draft = byte_model(), byte_model(seed=1, num_layers=1)
    plain = model.generate_many(["Hello", "to be"], max_new_tokens=20)
    assert model.generate_many(["Hello", "to be"], max_new_tokens=20, speculate=draft) == plain


def test_a_draft_model_encodes_the_source_itself():
    model, draft = translation_model(), Model(toy(translator()))
    reads = []
    draft.network.encoder.register_forward_hook(lambda *seen: reads.append(seen[1][0].tolist()))
    plain = model.generate_many(PROMPTS, max_new_tokens=12)
    assert model.generate_many(PROMPTS, max_new_tokens=12, speculate=draft) == plain
    assert reads == [[source] for source in PROMPTS]


def test_a_draft_model_with_fewer_positions_stops_drafting():
    model, draft = Model(toy(decoder())), Model(toy(decoder(position=LearnedPositions(num_positions=32))))
    for length in (28, 32, 33, 40):
        plain = model.generate([1] * length, max_new_tokens=12)
        assert model.generate([1] * length, max_new_tokens=12, speculate=draft) == plain


def test_a_draft_model_must_have_the_same_stacks():
    encoder_decoder, decoder_only = translation_model(), Model(toy(decoder()))
    for model, draft in (
        (encoder_decoder, decoder_only),
        (decoder_only, encoder_decoder),
        (decoder_only, Model(toy(encoder()))),
    ):
        with pytest.raises(ClearheadError, match="the draft model is of another kind"):
            model.generate([1], speculate=draft)


# --- invalid calls


INVALID = {
    "two prompts": (lambda m: m.generate(["a", "b"]), "generate_many takes several prompts"),
    "a number": (lambda m: m.generate(3), "the prompt is 3; it must be a text or a list of token ids"),
    "None": (lambda m: m.generate(None), "the prompt is None"),
    "bytes": (lambda m: m.generate(b"hello"), "the prompt is b'hello'"),
    "a fraction as token id": (lambda m: m.generate([1.5]), "neither a text nor a list of token ids"),
    "empty prompt": (lambda m: m.generate(""), "the text is empty"),
    "one text for generate_many": (lambda m: m.generate_many("abc"), "give a list of prompts"),
    "a number for generate_many": (lambda m: m.generate_many(7), "give a list of prompts"),
    "temperature is text": (lambda m: m.generate("a", temperature="hot"), "temperature is 'hot'"),
    "temperature is negative": (lambda m: m.generate("a", temperature=-0.1), "temperature is -0.1"),
    "temperature is nan": (lambda m: m.generate("a", temperature=math.nan), "temperature is nan"),
    "top_p is 0": (lambda m: m.generate("a", top_p=0), "top_p is 0"),
    "top_p without temperature": (
        lambda m: m.generate("a", top_p=0.9),
        "top_p has no effect at temperature 0, .*to sample, use temperature 1",
    ),
    "seed without temperature": (lambda m: m.generate("a", seed=3), "seed has no effect at temperature 0"),
    "n without temperature": (
        lambda m: m.generate_many(["a"], n=2),
        "n is 2, but at temperature 0 all texts would be the same",
    ),
    "negative length": (lambda m: m.generate("a", max_new_tokens=-1), "max_new_tokens is -1"),
    "unknown stop id": (lambda m: m.generate("a", stop_ids=[999]), "stop_ids contains token 999"),
    "empty stop": (lambda m: m.generate("a", stop=""), "stop contains ''"),
    "a fraction of a sample": (lambda m: m.generate_many(["a"], n=1.5), "n is 1.5"),
    "n for generate": (lambda m: m.generate("a", n=2), "generate and stream return one text"),
    "beams is 0": (lambda m: m.generate("a", beams=0), "beams is 0"),
    "n exceeds beams": (
        lambda m: m.generate_many(["a"], n=3, beams=2),
        "n is 3; it must not exceed the number of beams, 2",
    ),
    "temperature with beams": (
        lambda m: m.generate("a", beams=2, temperature=1),
        "temperature has no effect with beams",
    ),
    "length_penalty without beams": (
        lambda m: m.generate("a", length_penalty=2),
        "length_penalty has no effect without beams",
    ),
    "beams and speculate": (lambda m: m.generate("a", beams=2, speculate="lookup"), "exclude each other"),
    "unknown speculation": (
        lambda m: m.generate("a", speculate="guess"),
        "speculate is 'guess'; it must be 'lookup' or a draft",
    ),
    "speculation with a module": (
        lambda m: m.generate("a", speculate=torch.nn.Linear(2, 2)),
        "speculate is a Linear; it must be",
    ),
    "draft model of another vocabulary": (
        lambda m: m.generate("a", speculate=Model(tiny_network())),
        "the draft model has a vocabulary of 31 tokens",
    ),
    "misspelt beams": (lambda m: m.generate("a", beam=2), "did you mean 'beams'"),
    "score of an empty text": (lambda m: m.score(""), "the text is empty"),
    "embedding of a number": (lambda m: m.embed(3), "the texts are 3"),
    "embedding of a list of numbers": (lambda m: m.embed([1, 2]), "it must be a text or a list of token ids"),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_call_raises_one_sentence_and_the_model_stays_usable(name):
    call, message = INVALID[name]
    model = byte_model()
    before = model.generate("Hello", max_new_tokens=4)
    with pytest.raises(ClearheadError, match=message) as caught:
        call(model)
    assert "\n" not in str(caught.value)
    assert model.generate("Hello", max_new_tokens=4) == before


def test_invalid_options_of_a_stream_raise_when_it_is_created():
    model = byte_model()
    for options in ({"temprature": 1}, {"top_p": 0}, {"stop_ids": [999]}, {"speculate": "guess"}, {"beams": 2}):
        with pytest.raises(ClearheadError):
            model.stream("Hello", **options)
    with pytest.raises(ClearheadError, match="empty"):
        model.stream("")
    with pytest.raises(ClearheadError, match="no tokenizer"):
        Model(tiny_network()).stream([1])


def test_the_largest_seed_wraps_around_for_the_next_sample():
    model, options = byte_model(), {"temperature": 1.0, "max_new_tokens": 8}
    first, second = model.generate_many(["Hello"], n=2, seed=2**63 - 1, **options)
    assert first.tokens == model.generate("Hello", seed=2**63 - 1, **options).tokens
    assert second.tokens == model.generate("Hello", seed=-(2**63), **options).tokens != first.tokens


def test_max_new_tokens_0_generates_an_empty_text():
    result = byte_model().generate("Hello", max_new_tokens=0)
    assert (result.tokens, result.text, result.finish_reason) == ([], "", "length")


def test_an_encoder_embeds_but_does_not_generate():
    model = Model(toy(shrink(preset("bert-base"))))
    with pytest.raises(
        ClearheadError, match="this model has only an encoder, so it cannot generate texts; it can embed them"
    ):
        model.generate([1])
    with pytest.raises(ClearheadError, match="the text has 33 tokens; this model reads at most 32"):
        model.embed([[1] * 33])


def test_sources_are_checked_before_the_encoder_reads_them():
    model = translation_model()
    with pytest.raises(ClearheadError, match="the text is empty"):
        model.generate([])
    with pytest.raises(ClearheadError, match="token id 10000 is out of range"):
        model.generate([10000])


# --- the context


def test_a_text_that_uses_up_the_learned_positions_finishes_by_context():
    model = Model(toy(shrink(preset("gpt2"))))  # 32 positions
    result = model.generate([1] * 20, max_new_tokens=100)
    assert (len(result.tokens), result.finish_reason, result.num_past_context) == (13, "context", 0)
    assert model.generate([1] * 20, max_new_tokens=13).finish_reason == "length"
    with pytest.raises(ClearheadError, match="the text has 33 tokens; this model reads at most 32"):
        model.generate([1] * 33)


def test_rotary_positions_continue_past_the_context_and_count_the_tokens():
    model = byte_model(context=16)
    within = model.generate("x" * 10, max_new_tokens=7)  # the last token is not read
    beyond = model.generate("x" * 10, max_new_tokens=12)
    assert (within.finish_reason, within.num_past_context) == ("length", 0)
    assert (beyond.finish_reason, beyond.num_past_context) == ("length", 5)
    assert beyond.tokens[:7] == within.tokens


def test_a_stream_has_the_generation_so_far():
    model = byte_model()
    stream = model.stream("Hello", max_new_tokens=9, logprobs=1)
    first = next(stream)
    assert stream.generation.tokens == model.generate("Hello", max_new_tokens=1).tokens
    assert stream.generation.finish_reason == "unfinished"
    text = first + "".join(stream)
    assert stream.generation == model.generate("Hello", max_new_tokens=9, logprobs=1)
    assert text == stream.generation.text


# --- memory


@pytest.fixture
def little_memory():
    """Limit the process to 256 MB more than it has now; smaller requests may be served from freed memory."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("only Linux reports and limits the memory of a process")
    pages = int(statm.read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_out_of_memory_raises_one_sentence(little_memory):
    model, prompt = byte_model(), [1] * 5_000_000  # 320 MB as vectors
    for call in (
        lambda: model.generate(prompt),
        lambda: model.generate(prompt, beams=2),
        lambda: model.embed([prompt]),
    ):
        with pytest.raises(ClearheadError, match="there is not enough memory"):
            call()
    assert len(model.generate("Hello", max_new_tokens=4).tokens) == 4


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
        {"beams": 3},
        {"speculate": "lookup"},
        {"speculate": "lookup", "temperature": 1.0},
    ],
    ids=str,
)
def test_logits_that_are_not_finite_raise_one_sentence(monkeypatch, number, options):
    """Also in the middle of a text."""
    model, calls = byte_model(), count()
    compute_logits = model.network.compute_logits

    def broken(hidden):
        logits = compute_logits(hidden)
        logits[0, 5] = number if next(calls) == 1 else 0
        return logits

    monkeypatch.setattr(model.network, "compute_logits", broken)
    with pytest.raises(ClearheadError, match=r"the network's logits are not finite, .*; load the model in float32"):
        model.generate("abab", max_new_tokens=30, **options)


def test_only_out_of_memory_errors_are_explained():
    with pytest.raises(RuntimeError, match="mat1 and mat2"), explain_out_of_memory():
        torch.ones(2, 3) @ torch.ones(2, 3)
    with pytest.raises(ClearheadError, match="not enough memory"), explain_out_of_memory():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    with pytest.raises(ClearheadError, match="not enough memory"), explain_out_of_memory():
        raise RuntimeError("Invalid buffer size: 20.00 GiB")  # of Apple's GPUs


# --- the CUDA graph


@pytest.mark.parametrize("use_cuda_graph", [True, False])
def test_the_graph_is_considered_only_with_use_cuda_graph(monkeypatch, use_cuda_graph):
    calls = []
    monkeypatch.setattr(text_generator, "can_decode_in_graph", lambda *arguments: calls.append(arguments))
    assert replace(byte_model(), use_cuda_graph=use_cuda_graph).generate("Hello", max_new_tokens=2).tokens
    assert bool(calls) == use_cuda_graph


@pytest.mark.parametrize("fast", [None, False])
def test_fast_false_disables_the_cuda_graph(tmp_path, fast):
    assert load(byte_model().save(tmp_path / "model"), fast=fast).use_cuda_graph == (fast is not False)


# --- characters without a token


def letter_model(special=None):
    tokenizer = character_tokenizer("helo", special)
    return Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer)


def test_a_warning_names_each_character_without_a_token_once():
    model = letter_model()
    for call in (lambda: model.generate("HHell!o", max_new_tokens=2), lambda: model.score("HHell!o")):
        with pytest.warns(UserWarning, match=r"this model has no token for 'H', '!' and reads an unknown token"):
            call()
    with pytest.warns(UserWarning, match="'A', 'B', 'C', 'D', 'E', 'F', 'G', 'H', … and"):
        model.encode("hABCDEFGHIJ")


def test_a_text_without_any_known_character_raises():
    with pytest.raises(ClearheadError, match="has no token for any character of 'HALT'"):
        letter_model().generate("HALT")


@pytest.mark.parametrize("options", [{"n": 10**9, "temperature": 1.0}, {"beams": 10**9}])
def test_a_billion_texts_are_rejected_at_once(options):
    model = Model(toy(decoder()))
    with pytest.raises(ClearheadError, match=r"(n|beams) is 1000000000; it must be at most 65536"):
        model.generate_many([[1, 2]], **options)

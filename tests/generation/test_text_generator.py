"""Beams, speculation, context and memory as Model.generate meets them; wrong calls, each one sentence."""

import math
import resource
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
import transformers

from clearhead.api import Model, load
from clearhead.architecture.parts import LearnedPositions
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.generation import text_generator as text_generator
from clearhead.generation.beam import BeamOptions, beam_search
from clearhead.generation.prompts import encode_sources, explain_out_of_memory
from clearhead.generation.speculative import PromptLookup
from clearhead.tokenization.characters import byte_tokenizer, character_tokenizer
from tests.book.shrink import shrink
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import decoder, encoder, toy, translator
from tests.parity.harness import float32_means_float64, load_ours, rerandomize

PROMPTS = [[3, 7, 1, 9, 11], [4], [12, 6, 8]]


def speaking(**changes):
    tokenizer = byte_tokenizer()
    return Model(tiny_network(vocab_size=tokenizer.vocab_size, **changes), tokenizer)


def translating():
    return Model(toy(translator()), special_ids={"decoder_start_token_id": 2, "eos_token_id": 5})


# --- beams


def test_beams_of_a_decoder_are_those_of_transformers(tmp_path):
    """Texts, scores and the n best, in float64: no order hangs on a rounding."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    with float32_means_float64():
        torch.manual_seed(0)
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=13, **sizes)).eval()
        rerandomize(theirs, lambda name, tensor: None)
        theirs.to(torch.float64)
        found = theirs.generate(
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
    model = Model(load_ours(theirs, tmp_path), special_ids={"eos_token_id": [5, 1, 8]})
    ours = model.generate_many([PROMPTS[0]], n=3, beams=4, length_penalty=0.6, max_new_tokens=9)
    lengths = (found.beam_indices >= 0).sum(dim=1).tolist()
    assert [one.tokens for one in ours] == [
        row[len(PROMPTS[0]) :][:length].tolist() for row, length in zip(found.sequences, lengths, strict=True)
    ]
    assert [one.score for one in ours] == pytest.approx(found.sequences_scores.tolist(), rel=1e-12)
    assert "stop" in {one.finish_reason for one in ours}


def test_beams_of_an_encoder_decoder():
    model = translating()
    made = model.generate_many(PROMPTS, n=2, beams=3, max_new_tokens=8)
    options = BeamOptions(num_beams=3, num_best=2, max_new_tokens=8, stop_ids=[5])
    expected = beam_search(model.network, [[2]] * 3, options, encode_sources(model.network, PROMPTS))
    assert [one.tokens for one in made] == [beam.tokens for beams in expected for beam in beams]
    assert made[0].prompt_tokens == made[1].prompt_tokens == PROMPTS[0]
    assert model.generate(PROMPTS[1], beams=3, max_new_tokens=8).tokens == made[2].tokens


def test_beams_have_text_and_one_beam_is_greedy():
    model = speaking()
    one = model.generate("Hello", beams=1, max_new_tokens=12)
    greedy = model.generate("Hello", max_new_tokens=12, logprobs=0)
    assert (one.tokens, one.text) == (greedy.tokens, greedy.text)
    assert one.score == pytest.approx(sum(greedy.logprobs) / 12, abs=1e-5)


def test_a_longer_neighbour_does_not_shorten_beams():
    model = Model(toy(shrink(preset("gpt2"))))  # 32 positions
    made = model.generate_many([[1, 2], [3] * 25], beams=2, max_new_tokens=20)
    assert [(len(one.tokens), one.finish_reason) for one in made] == [(20, "length"), (8, "context")]
    assert made[0].tokens == model.generate([1, 2], beams=2, max_new_tokens=20).tokens


# --- speculation


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 3, "top_k": 5}], ids=["greedy", "drawn"])
def test_lookup_gives_what_its_own_loop_gives(how):
    model = speaking()
    options = {"max_new_tokens": 40} | how
    made = model.generate("to be to be to", speculate="lookup", **options)
    assert made == model.generate("to be to be to", speculate=PromptLookup(), **options)
    assert "".join(model.stream("to be to be to", speculate="lookup", **options)) == made.text
    if not how:
        assert made == model.generate("to be to be to", **options)


def test_a_draft_model_changes_nothing():
    model, draft = speaking(), speaking(seed=1, num_layers=1)
    plain = model.generate_many(["Hello", "to be"], max_new_tokens=20)
    assert model.generate_many(["Hello", "to be"], max_new_tokens=20, speculate=draft) == plain


def test_a_draft_model_reads_the_source_for_itself():
    model, draft = translating(), Model(toy(translator()))
    reads = []
    draft.network.encoder.register_forward_hook(lambda *seen: reads.append(seen[1][0].tolist()))
    plain = model.generate_many(PROMPTS, max_new_tokens=12)
    assert model.generate_many(PROMPTS, max_new_tokens=12, speculate=draft) == plain
    assert reads == [[source] for source in PROMPTS]


def test_a_draft_with_fewer_positions_stops_guessing():
    model, draft = Model(toy(decoder())), Model(toy(decoder(position=LearnedPositions(num_positions=32))))
    for length in (28, 32, 33, 40):
        plain = model.generate([1] * length, max_new_tokens=12)
        assert model.generate([1] * length, max_new_tokens=12, speculate=draft) == plain


def test_a_draft_must_be_of_the_same_kind():
    both, alone = translating(), Model(toy(decoder()))
    for model, draft in ((both, alone), (alone, both), (alone, Model(toy(encoder())))):
        with pytest.raises(ClearheadError, match="the draft model is of another kind"):
            model.generate([1], speculate=draft)


# --- what a caller can get wrong


WRONG = {
    "two prompts": (lambda m: m.generate(["a", "b"]), "generate_many takes several"),
    "a number": (lambda m: m.generate(3), "the prompt is 3; it must be a text or a list of token ids"),
    "nothing": (lambda m: m.generate(None), "the prompt is None"),
    "bytes": (lambda m: m.generate(b"hello"), "the prompt is b'hello'"),
    "half a token": (lambda m: m.generate([1.5]), "neither a text nor a list of token ids"),
    "empty": (lambda m: m.generate(""), "the text is empty"),
    "one text for many": (lambda m: m.generate_many("abc"), "give a list of them"),
    "a number for many": (lambda m: m.generate_many(7), "give a list of them"),
    "hot": (lambda m: m.generate("a", temperature="hot"), "temperature is 'hot'"),
    "cold": (lambda m: m.generate("a", temperature=-0.1), "temperature is -0.1"),
    "not a number": (lambda m: m.generate("a", temperature=math.nan), "temperature is nan"),
    "no mass": (lambda m: m.generate("a", top_p=0), "top_p is 0"),
    "mass of nothing": (
        lambda m: m.generate("a", top_p=0.9),
        "top_p has no effect at temperature 0, .*temperature 1 draws",
    ),
    "seed of nothing": (lambda m: m.generate("a", seed=3), "seed has no effect at temperature 0"),
    "the same twice": (
        lambda m: m.generate_many(["a"], n=2),
        "n is 2, but at temperature 0 all texts would be the same",
    ),
    "negative length": (lambda m: m.generate("a", max_new_tokens=-1), "max_new_tokens is -1"),
    "unknown stop id": (lambda m: m.generate("a", stop_ids=[999]), "stop_ids names token 999"),
    "empty stop": (lambda m: m.generate("a", stop=""), "stop has ''"),
    "half a sample": (lambda m: m.generate_many(["a"], n=1.5), "n is 1.5"),
    "several from one": (lambda m: m.generate("a", n=2), "generate gives one text"),
    "no beam": (lambda m: m.generate("a", beams=0), "beams is 0"),
    "more than found": (
        lambda m: m.generate_many(["a"], n=3, beams=2),
        "n is 3; it must not exceed the number of beams, 2",
    ),
    "warm beams": (lambda m: m.generate("a", beams=2, temperature=1), "temperature has no effect with beams"),
    "penalty alone": (lambda m: m.generate("a", length_penalty=2), "length_penalty has no effect without beams"),
    "both": (lambda m: m.generate("a", beams=2, speculate="lookup"), "exclude each other"),
    "guess": (lambda m: m.generate("a", speculate="guess"), "speculate is 'guess'; it must be 'lookup' or a draft"),
    "a module": (lambda m: m.generate("a", speculate=torch.nn.Linear(2, 2)), "speculate is a Linear; it must be"),
    "other tokens": (lambda m: m.generate("a", speculate=Model(tiny_network())), "the draft model has 31 tokens"),
    "mistyped beams": (lambda m: m.generate("a", beam=2), "did you mean 'beams'"),
    "score of nothing": (lambda m: m.score(""), "the text is empty"),
    "one number": (lambda m: m.embed(3), "the texts are 3"),
    "embedding of a number": (lambda m: m.embed([1, 2]), "it must be a text or a list of token ids"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_one_sentence_and_the_model_goes_on(name):
    call, sentence = WRONG[name]
    model = speaking()
    before = model.generate("Hello", max_new_tokens=4)
    with pytest.raises(ClearheadError, match=sentence) as caught:
        call(model)
    assert "\n" not in str(caught.value)
    assert model.generate("Hello", max_new_tokens=4) == before


def test_a_stream_says_what_is_wrong_before_it_begins():
    model = speaking()
    for options in ({"temprature": 1}, {"top_p": 0}, {"stop_ids": [999]}, {"speculate": "guess"}, {"beams": 2}):
        with pytest.raises(ClearheadError):
            model.stream("Hello", **options)
    with pytest.raises(ClearheadError, match="empty"):
        model.stream("")
    with pytest.raises(ClearheadError, match="no tokenizer"):
        Model(tiny_network()).stream([1])


def test_the_largest_seed_serves_several_texts():
    model, hot = speaking(), {"temperature": 1.0, "max_new_tokens": 8}
    first, second = model.generate_many(["Hello"], n=2, seed=2**63 - 1, **hot)
    assert first.tokens == model.generate("Hello", seed=2**63 - 1, **hot).tokens
    assert second.tokens == model.generate("Hello", seed=-(2**63), **hot).tokens != first.tokens


def test_no_new_tokens_are_none():
    made = speaking().generate("Hello", max_new_tokens=0)
    assert (made.tokens, made.text, made.finish_reason) == ([], "", "length")


def test_an_encoder_alone_embeds():
    model = Model(toy(shrink(preset("bert-base"))))
    with pytest.raises(ClearheadError, match="embeds texts, and does not generate"):
        model.generate([1])
    with pytest.raises(ClearheadError, match="the text has 33 tokens; this model reads 32 at most"):
        model.embed([[1] * 33])


def test_a_source_is_checked_before_the_encoder_reads_it():
    model = translating()
    with pytest.raises(ClearheadError, match="the text is empty"):
        model.generate([])
    with pytest.raises(ClearheadError, match="token id 10000 is out of range"):
        model.generate([10000])


# --- the end of the context


def test_learned_positions_end_a_text_by_context():
    model = Model(toy(shrink(preset("gpt2"))))  # 32 positions
    made = model.generate([1] * 20, max_new_tokens=100)
    assert (len(made.tokens), made.finish_reason, made.num_past_context) == (13, "context", 0)
    assert model.generate([1] * 20, max_new_tokens=13).finish_reason == "length"
    with pytest.raises(ClearheadError, match="the text has 33 tokens; this model reads 32 at most"):
        model.generate([1] * 33)


def test_rotary_positions_go_on_and_say_how_far():
    model = speaking(context=16)
    inside = model.generate("x" * 10, max_new_tokens=7)  # the last token is not read
    beyond = model.generate("x" * 10, max_new_tokens=12)
    assert (inside.finish_reason, inside.num_past_context) == ("length", 0)
    assert (beyond.finish_reason, beyond.num_past_context) == ("length", 5)
    assert beyond.tokens[:7] == inside.tokens


def test_a_stream_tells_what_became_of_it():
    model = speaking()
    stream = model.stream("Hello", max_new_tokens=9, logprobs=1)
    first = next(stream)
    assert stream.generation.tokens == model.generate("Hello", max_new_tokens=1).tokens
    assert stream.generation.finish_reason == "nothing"
    text = first + "".join(stream)
    assert stream.generation == model.generate("Hello", max_new_tokens=9, logprobs=1)
    assert text == stream.generation.text


# --- memory


@pytest.fixture
def little_memory():
    """What the process has now, and 256 MB more: freed memory of earlier tests may serve what is smaller."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("only Linux tells and limits the memory of a process")
    pages = int(statm.read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_out_of_memory_is_one_sentence(little_memory):
    model, prompt = speaking(), [1] * 5_000_000  # 320 MB as vectors
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
def test_logits_that_are_no_numbers_are_one_sentence(monkeypatch, number, options):
    """Also where they come up in the middle of a text."""
    model, calls = speaking(), count()
    to_logits = model.network.to_logits

    def broken(hidden):
        logits = to_logits(hidden)
        logits[0, 5] = number if next(calls) == 1 else 0
        return logits

    monkeypatch.setattr(model.network, "to_logits", broken)
    with pytest.raises(ClearheadError, match=r"the network's logits are not numbers: .* float32 is wide enough"):
        model.generate("abab", max_new_tokens=30, **options)


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="mat1 and mat2"), explain_out_of_memory():
        torch.ones(2, 3) @ torch.ones(2, 3)
    with pytest.raises(ClearheadError, match="not enough memory"), explain_out_of_memory():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    with pytest.raises(ClearheadError, match="not enough memory"), explain_out_of_memory():
        raise RuntimeError("Invalid buffer size: 20.00 GiB")  # of Apple's GPUs


# --- the graph of a GPU


@pytest.mark.parametrize("in_graph", [True, False])
def test_a_graph_is_used_only_where_it_may_be(monkeypatch, in_graph):
    asked = []
    monkeypatch.setattr(text_generator, "fits", lambda network, rows, cache: asked.append(rows) or False)
    assert replace(speaking(), in_graph=in_graph).generate("Hello", max_new_tokens=2).tokens
    assert bool(asked) == in_graph


@pytest.mark.parametrize("fast", [None, False])
def test_fast_false_keeps_a_model_from_its_graph(tmp_path, fast):
    assert load(speaking().save(tmp_path / "model"), fast=fast).in_graph == (fast is not False)


# --- characters that no token stands for


def lettered(special=None):
    tokenizer = character_tokenizer("helo", special)
    return Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer)


def test_characters_without_a_token_are_named_once():
    model = lettered()
    for said in (lambda: model.generate("HHell!o", max_new_tokens=2), lambda: model.score("HHell!o")):
        with pytest.warns(UserWarning, match=r"this model has no token for 'H', '!', and reads an unknown one"):
            said()
    with pytest.warns(UserWarning, match="'A', 'B', 'C', 'D', 'E', 'F', 'G', 'H', …, and"):
        model.encode("hABCDEFGHIJ")


def test_a_text_of_such_characters_alone_is_refused():
    with pytest.raises(ClearheadError, match="has no token for any character of 'HALT'"):
        lettered().generate("HALT")

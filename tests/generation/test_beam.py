"""Beam search equals transformers' `generate`, an exhaustive search, and for one beam greedy decoding."""

import itertools

import pytest
import torch
import transformers

from clearhead.api import Model
from clearhead.architecture import LearnedPositions
from clearhead.errors import ClearheadError
from clearhead.generation.beam import Hypothesis, Search, beam_search
from clearhead.generation.plain import decode_plainly
from clearhead.model.attention import Attention
from clearhead.model.transformer import EncoderOutput
from clearhead.options import BeamOptions, SamplingOptions
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import CONTEXT, decoder, toy, translator
from tests.parity.harness import float32_as_float64, load_network, randomize
from tests.parity.test_bart import keep_sinusoids

V = 13  # few tokens, so that a stop token is likely and beams end at different times

LLAMA = {
    "vocab_size": V,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
}
GPT2 = {"vocab_size": V, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 40}
T5 = {
    "vocab_size": V,
    "d_model": 24,
    "d_kv": 6,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": V,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
BUILD = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**LLAMA, sliding_window=4)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)),
    "marian": lambda: transformers.MarianMTModel(transformers.MarianConfig(**BART)),
}
EARLY_STOPPING = {"full": True, "unlikely": False, "impossible": "never"}
PROMPTS = [[3, 7, 1, 9, 11], [4], [12, 6, 8]]
CHOICES = [
    BeamOptions(
        num_beams=num_beams,
        num_best=num_beams,
        max_new_tokens=14,
        length_penalty=penalty,
        stop_when=stop_when,
        stop_ids=stop_ids,
    )
    for num_beams, penalty, stop_when, stop_ids in itertools.product(
        (2, 5), (-1.0, 0.0, 1.0, 2.5), EARLY_STOPPING, ([], [2, 5], [1, 2, 5, 7, 10])
    )
]


def make_pair(name, seed, folder):
    """Return one model, theirs and ours, in float64, so that no order of beams depends on rounding."""
    with float32_as_float64():
        torch.manual_seed(seed)
        theirs = BUILD[name]().eval()
        randomize(theirs, keep_sinusoids if name == "marian" else lambda name, tensor: None)
        theirs.to(torch.float64)
    theirs.generation_config.forced_eos_token_id = None
    return theirs, load_network(theirs, folder)


def pad(rows, left):
    longest = max(map(len, rows))
    gaps = [[0] * (longest - len(row)) for row in rows]
    tokens = [[*gap, *row] if left else [*row, *gap] for row, gap in zip(rows, gaps, strict=True)]
    mask = [[0] * len(gap) + [1] * len(row) for row, gap in zip(rows, gaps, strict=True)]
    return torch.tensor(tokens), torch.tensor(mask if left else [row[::-1] for row in mask])


def transformers_beams(model, options, prompts=PROMPTS):
    """Return (tokens, score) of every beam of every prompt, computed by transformers."""
    tokens, mask = pad(prompts, left=not model.config.is_encoder_decoder)
    with float32_as_float64():
        result = model.generate(
            input_ids=tokens,
            attention_mask=mask,
            do_sample=False,
            num_beams=options.num_beams,
            num_return_sequences=options.num_best,
            max_new_tokens=options.max_new_tokens,
            length_penalty=options.length_penalty,
            early_stopping=EARLY_STOPPING[options.stop_when],
            eos_token_id=list(options.stop_ids) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    lengths = (result.beam_indices >= 0).sum(dim=1).tolist()
    start = 1 if model.config.is_encoder_decoder else tokens.shape[1]
    texts = [row[start : start + length].tolist() for row, length in zip(result.sequences, lengths, strict=True)]
    beams = list(zip(texts, result.sequences_scores.tolist(), strict=True))
    return [beams[first : first + options.num_best] for first in range(0, len(beams), options.num_best)]


def run_encoder(network, sources):
    tokens, mask = pad(sources, left=False)
    with torch.inference_mode():
        return network.encode(tokens, mask)


def our_beams(network, options, start=0):
    if network.config.is_encoder_decoder:
        return beam_search(network, [[start]] * len(PROMPTS), options, run_encoder(network, PROMPTS))
    return beam_search(network, PROMPTS, options)


# --- transformers


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", BUILD)
def test_tokens_and_scores_equal_transformers(name, seed, tmp_path):
    theirs, network = make_pair(name, seed, tmp_path)
    lengths = set()
    for options in CHOICES[seed::7]:
        expected = transformers_beams(theirs, options)
        result = our_beams(network, options, theirs.config.to_dict().get("decoder_start_token_id"))
        assert [[beam.tokens for beam in beams] for beams in result] == [
            [text for text, _ in beams] for beams in expected
        ]
        for ours, their in zip(result, expected, strict=True):
            assert [beam.score for beam in ours] == pytest.approx([score for _, score in their], rel=1e-12)
        lengths |= {len(beam.tokens) for beams in result for beam in beams}
    assert len(lengths) >= 3, "beams should end at different lengths"


def test_a_marian_model_equals_transformers_on_200_random_inputs(tmp_path):
    """Through the public API, in batches of different lengths."""
    theirs, network = make_pair("marian", 9, tmp_path)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (200,), generator=generator).tolist()
    sources = [torch.randint(V, (length,), generator=generator).tolist() for length in lengths]
    stops = [1, 2, 5, 7, 10]
    model = Model(
        network, special_ids={"decoder_start_token_id": BART["decoder_start_token_id"], "eos_token_id": stops}
    )
    options = BeamOptions(num_beams=4, max_new_tokens=24, stop_ids=stops)
    generations, expected = [], []
    for first in range(0, 200, 50):
        batch = sources[first : first + 50]
        generations += model.generate_many(batch, beams=4, max_new_tokens=24)
        expected += [beams[0] for beams in transformers_beams(theirs, options, batch)]
    assert [beam.tokens for beam in generations] == [text for text, _ in expected]
    assert [beam.score for beam in generations] == pytest.approx([score for _, score in expected], rel=1e-12)
    assert len({len(beam.tokens) for beam in generations}) >= 3


# --- exhaustive search


def all_texts(vocab_size, limit, stops):
    """Yield texts that end with their first stop token, and texts of maximum length without an earlier one."""
    inner = [t for t in range(vocab_size) if t not in stops]
    for length in range(1, limit + 1):
        last = range(vocab_size) if length == limit else stops
        yield from ([*start, end] for start in itertools.product(inner, repeat=length - 1) for end in last)


def exact_score(network, prompt, text, penalty, encoder_output=None):
    """Return the score from one forward pass, without a cache."""
    tokens = torch.tensor([[*prompt, *text]])
    logits = network(tokens) if encoder_output is None else network.decode(tokens, encoder_output)
    logprobs = logits[0].log_softmax(dim=-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(text)[:, None])
    return logprobs.sum().item() / len(text) ** penalty


@pytest.mark.parametrize("penalty", [-0.5, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_with_enough_beams_the_best_of_all_texts_are_found(seed, penalty):
    network = tiny_network(seed, vocab_size=5).double()
    prompt, limit, stops = [1, 4], 4, [3]
    with torch.inference_mode():
        scores = [(exact_score(network, prompt, text, penalty), text) for text in all_texts(5, limit, stops)]
    best = sorted(scores, reverse=True)[:20]
    options = BeamOptions(
        num_beams=5**limit,
        num_best=20,
        max_new_tokens=limit,
        length_penalty=penalty,
        stop_ids=stops,
        stop_when="impossible",
    )
    result = beam_search(network, [prompt], options)[0]
    assert [beam.tokens for beam in result] == [text for _, text in best]
    assert [beam.score for beam in result] == pytest.approx([score for score, _ in best], rel=1e-12)


def test_with_enough_beams_the_best_of_all_answers_are_found():
    network = toy(translator())
    encoder_output = run_encoder(network, [[3, 4, 5]])
    with torch.inference_mode():
        texts = all_texts(network.config.vocab_size, 2, [2])
        best = sorted(((exact_score(network, [1], text, 1.0, encoder_output), text) for text in texts), reverse=True)[
            :20
        ]
    options = BeamOptions(num_beams=29**2, num_best=20, max_new_tokens=2, stop_ids=[2])
    assert [beam.tokens for beam in beam_search(network, [[1]], options, encoder_output)[0]] == [
        text for _, text in best
    ]


def test_fewer_possible_texts_than_num_best():
    network = tiny_network(vocab_size=5)
    result = beam_search(network, [[1], [2, 3]], BeamOptions(num_beams=40, num_best=30, max_new_tokens=2))
    assert [len(beams) for beams in result] == [25, 25]
    assert all(len({tuple(beam.tokens) for beam in beams}) == 25 for beams in result)


def test_tokens_with_probability_0_are_in_no_beam():
    network = tiny_network(vocab_size=5)
    impossible = torch.tensor([0, 2, 3])
    network.head.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, impossible, -torch.inf))
    result = beam_search(network, [[1]], BeamOptions(num_beams=9, num_best=9, max_new_tokens=3))[0]
    assert sorted(beam.tokens for beam in result) == [list(text) for text in itertools.product([1, 4], repeat=3)]


# --- greedy decoding and the stopping rules


def test_one_beam_equals_greedy_decoding():
    network = tiny_network().double()
    for prompt, stop_ids in ([3, 1], []), ([7], [11, 30]), ([9, 8, 2], range(0, 31, 3)):
        greedy = list(decode_plainly(network, prompt, SamplingOptions(max_new_tokens=12, stop_ids=stop_ids)))
        result = beam_search(network, [prompt], BeamOptions(num_beams=1, max_new_tokens=12, stop_ids=stop_ids))
        assert result[0][0].tokens == greedy


def test_a_prompt_has_the_same_beams_alone_and_in_a_batch():
    network = tiny_network().double()
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [9]]
    options = BeamOptions(num_beams=3, num_best=3, max_new_tokens=10, stop_ids=range(0, 31, 4))
    together = beam_search(network, prompts, options)
    assert len({len(beam.tokens) for beams in together for beam in beams}) > 2
    for prompt, beams in zip(prompts, together, strict=True):
        alone = beam_search(network, [prompt], options)[0]
        assert [beam.tokens for beam in alone] == [beam.tokens for beam in beams]
        assert [beam.score for beam in alone] == pytest.approx([beam.score for beam in beams], rel=1e-12)


def test_later_stopping_rules_never_score_worse_and_sometimes_better():
    best = {rule: [] for rule in EARLY_STOPPING}
    for seed, rule in itertools.product(range(12), EARLY_STOPPING):
        network = tiny_network(seed, vocab_size=V).double()
        options = BeamOptions(
            num_beams=3, max_new_tokens=20, length_penalty=1.5, stop_when=rule, stop_ids=[2, 5, 7], num_best=3
        )
        best[rule].append(sum(beam.score for beam in beam_search(network, [[4, 1]], options)[0]))
    gains = [[b - a for a, b in zip(best[x], best[y], strict=True)] for x, y in itertools.pairwise(EARLY_STOPPING)]
    assert all(min(gain) >= 0 and max(gain) > 0.01 for gain in gains)


@pytest.mark.parametrize(
    ("rule", "penalty", "ended", "done"),
    [
        ("full", 1.0, -0.9, True),
        ("unlikely", 1.0, -0.9, True),  # -5 / 2 is below -2
        ("impossible", 1.0, -0.9, False),  # -5 / 10 is not
        ("full", -3.0, -6.0, True),
        ("unlikely", -3.0, -6.0, False),  # -5 · 2³ is above -6 · 2³
        ("impossible", -3.0, -6.0, False),  # -5 · 10³ is not, but the text might end now
        ("impossible", -3.0, -0.9, True),
    ],
)
def test_a_search_ends_by_its_stopping_rule(rule, penalty, ended, done):
    search = Search(BeamOptions(num_beams=2, length_penalty=penalty, stop_when=rule, stop_ids=[0]), 10, prompt=0)
    search.step([Hypothesis((1,), -0.5, 0), Hypothesis((0,), -2.0, 0)])
    assert not search.is_done
    search.step([Hypothesis((1, 0), ended, 0), Hypothesis((1, 1), -5.0, 0)])
    assert search.is_done == done


def test_beams_end_with_the_learned_positions():
    network = toy(decoder(LearnedPositions(num_positions=CONTEXT)))
    result = beam_search(network, [[1] * (CONTEXT - 2), [2]], BeamOptions(num_beams=2, max_new_tokens=9))
    assert [len(beams[0].tokens) for beams in result] == [3, 9]  # the shorter prompt is not limited


# --- the encoder output


def test_cross_attention_is_computed_once_and_copied_only_when_rows_change(monkeypatch):
    network = toy(translator())
    computed, copied = [], []
    keys_and_values, select = Attention.keys_and_values, EncoderOutput.select
    layers = [block.cross_attention for block in network.decoder.layers]
    monkeypatch.setattr(
        Attention,
        "keys_and_values",
        lambda self, *inputs: computed.append(self) or keys_and_values(self, *inputs),
    )
    monkeypatch.setattr(EncoderOutput, "select", lambda self, rows: copied.append(rows.tolist()) or select(self, rows))
    encoder_output = run_encoder(network, [[3, 4, 5], [6, 7]])
    beam_search(network, [[1], [1]], BeamOptions(num_beams=3, max_new_tokens=8), encoder_output)
    assert [computed.count(layer) for layer in layers] == [1, 1]
    assert copied == [[0, 0, 0, 1, 1, 1]]


def test_a_search_ends_while_another_one_branches(tmp_path):
    """There are two rows before and after, but of different sources."""
    network = make_pair("bart", 1, tmp_path)[1]
    sources = [[3, 4, 5], [6, 7]]
    encoder_output = run_encoder(network, sources)
    with torch.inference_mode():
        first, second = network.decode(torch.tensor([[3], [3]]), encoder_output)[:, -1].topk(2).indices.tolist()
    assert set(first) != set(second)
    options = BeamOptions(num_beams=2, num_best=2, max_new_tokens=6, stop_when="full", stop_ids=first)
    together = beam_search(network, [[3], [3]], options, encoder_output)
    assert [beam.tokens for beam in together[0]] == [[token] for token in first]
    alone = beam_search(network, [[3]], options, run_encoder(network, sources[1:]))[0]
    assert [beam.tokens for beam in alone] == [beam.tokens for beam in together[1]]
    assert [beam.score for beam in alone] == pytest.approx([beam.score for beam in together[1]], rel=1e-12)


# --- invalid arguments


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        ({"num_beams": 0}, "num_beams is 0; it must be a whole number, 1 or more"),
        ({"num_best": 4}, "num_best is 4; it must not exceed num_beams, 3"),
        ({"max_new_tokens": 2.5}, r"max_new_tokens is 2\.5"),
        ({"length_penalty": float("nan")}, "length_penalty is nan; it must be from -10 to 10"),
        ({"stop_when": "never"}, "never"),
        ({"stop_ids": [-1]}, "stop_ids contains -1"),
    ],
)
def test_invalid_options_raise(invalid, message):
    with pytest.raises(ClearheadError, match=message):
        BeamOptions(**({"num_beams": 3} | invalid))


def test_invalid_calls_raise():
    options = BeamOptions(num_beams=2, stop_ids=[31])
    for prompts, message in ([], "no prompt"), ([[]], "text is empty"), ([[1]], "stop_ids contains token 31"):
        with pytest.raises(ClearheadError, match=message):
            beam_search(tiny_network(), prompts, options)

"""The decode loop equals generation without a cache, alone and in batches; stop strings, log-probabilities, scores."""

import pytest
import torch
import transformers

from clearhead.api import Model
from clearhead.architecture import DynamicScaling, Rope
from clearhead.cache.key_value_cache import KeyValueCache
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.generation.beam import beam_search
from clearhead.generation.decoding import decode, prefill
from clearhead.generation.plain import decode_plainly
from clearhead.generation.prompts import encode_sources
from clearhead.generation.scoring import score
from clearhead.generation.sequences import TokenSequence
from clearhead.generation.speculative import decode_speculatively
from clearhead.options import BeamOptions, SamplingOptions
from clearhead.tokenization.characters import byte_tokenizer
from tests.checkpoint.tiny import longrope, tiny_network
from tests.model.toys import decoder, toy, translator
from tests.parity.harness import load_network, randomize
from tests.toy_presets import shrink

DECODERS = (
    "gpt2",
    "llama-3.1-8b",
    "mistral-7b",
    "gemma-3-1b",
    "deepseek-v3",
    "llama-4-scout",
    "bloom-560m",
    "gopher-280b",
)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [3, 1, 4, 1, 5]]
OPTIONS = {
    "greedy": {},
    "sampled": {"temperature": 1.3, "seed": 5},
    "filtered": {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "seed": 7},
    "penalised": {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "seed": 3},
}


@pytest.fixture(scope="module", params=DECODERS)
def network(request):
    return toy(shrink(preset(request.param)))


def run(network, sequences, **options):
    """Decode to the end and return the new tokens."""
    for _ in decode(network, sequences, **options):
        pass
    return [sequence.tokens for sequence in sequences]


@pytest.mark.parametrize("settings", OPTIONS.values(), ids=OPTIONS)
def test_decoding_with_a_cache_equals_decoding_without(network, settings):
    options = SamplingOptions(max_new_tokens=12, **settings)
    for prompt in PROMPTS:
        assert run(network, [TokenSequence(prompt, options)]) == [list(decode_plainly(network, prompt, options))]


@pytest.mark.parametrize("settings", OPTIONS.values(), ids=OPTIONS)
def test_a_sequence_does_not_depend_on_the_rest_of_its_batch(network, settings):
    """The others have other lengths and options, and finish at other steps."""
    sequences = [
        TokenSequence(prompt, SamplingOptions(max_new_tokens=4 + 4 * n, **settings)) for n, prompt in enumerate(PROMPTS)
    ]
    alone = [run(network, [TokenSequence(each.prompt, each.options)])[0] for each in sequences]
    assert run(network, sequences) == alone


@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_chunked_prefill_does_not_change_the_tokens(network, chunk, monkeypatch):
    options = SamplingOptions(max_new_tokens=8)
    alone = [run(network, [TokenSequence(prompt, options)])[0] for prompt in PROMPTS]
    monkeypatch.setattr("clearhead.generation.decoding.PREFILL_CHUNK", chunk)
    assert run(network, [TokenSequence(prompt, options) for prompt in PROMPTS]) == alone


def test_prompts_that_need_a_mask_are_read_in_chunks(monkeypatch):
    """Windows and padding need one. With dynamic scaling a prompt is still read as a whole."""
    monkeypatch.setattr("clearhead.generation.decoding.PREFILL_CHUNK", 4)
    dynamic = Rope(scaling=DynamicScaling(factor=2.0, original_context=4))
    windowed, causal, scaled = toy(shrink(preset("mistral-7b"))), tiny_network(), tiny_network(rope=dynamic)
    for network, prompts, sizes in (
        (windowed, PROMPTS[:1], [4, 3]),
        (causal, PROMPTS[:1], [7]),
        (causal, PROMPTS, [4, 3]),
        (scaled, PROMPTS, [7]),
    ):
        lengths = []
        network.decoder.register_forward_pre_hook(
            lambda module, inputs, lengths=lengths: lengths.append(inputs[0].shape[1])
        )
        run(network, [TokenSequence(prompt, SamplingOptions(max_new_tokens=1)) for prompt in prompts])
        assert lengths == sizes


def test_each_sequence_continues_its_own_cached_tokens(network):
    """Even if two of them continue with the same prompt."""
    options, pasts, next_tokens = SamplingOptions(max_new_tokens=5), [[3, 1, 4], [1, 5, 9]], [2, 6]
    cache = KeyValueCache(network.config)
    prefill(network, pasts, cache)
    result = run(network, [TokenSequence(next_tokens, options, cached_tokens=past) for past in pasts], cache=cache)
    assert result == [run(network, [TokenSequence(past + next_tokens, options)])[0] for past in pasts]


def test_samples_of_one_prompt_read_it_once():
    network = toy(decoder())
    shapes = []
    network.decoder.layers[0].register_forward_pre_hook(
        lambda module, inputs: shapes.append(tuple(inputs[0].shape[:2]))
    )
    sequences = [
        TokenSequence([1, 2, 3, 4], SamplingOptions(max_new_tokens=3, temperature=1.0, seed=seed)) for seed in range(5)
    ]
    run(network, sequences)
    assert shapes == [(1, 4), (5, 1), (5, 1)]
    assert len({tuple(each.tokens) for each in sequences}) > 1


def test_finished_sequences_leave_the_batch():
    network = toy(decoder())
    sizes = []
    network.decoder.layers[0].register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    run(network, [TokenSequence([1, 2], SamplingOptions(max_new_tokens=count)) for count in (5, 1, 3, 0)])
    assert sizes == [1, 2, 2, 1, 1]


def test_a_text_ends_with_the_learned_positions():
    network = toy(shrink(preset("gpt2")))  # 32 positions
    sequence = TokenSequence(list(range(20)), SamplingOptions(max_new_tokens=100))
    run(network, [sequence])
    assert len(sequence.tokens) == 13  # the last is chosen at position 31 and needs no position itself
    assert sequence.finish_reason == "context"


def test_cached_tokens_count_towards_the_learned_positions_of_their_own_sequence():
    network = toy(shrink(preset("gpt2")))
    options, pasts, new = SamplingOptions(max_new_tokens=99), [[3] * 4, [1] * 20], [2, 6]
    cache = KeyValueCache(network.config)
    prefill(network, pasts, cache)
    result = run(network, [TokenSequence(new, options, cached_tokens=past) for past in pasts], cache=cache)
    assert result == [run(network, [TokenSequence(past + new, options)])[0] for past in pasts]
    assert [len(tokens) for tokens in result] == [32 - 6 + 1, 32 - 22 + 1]


def test_batches_of_an_encoder_decoder_equal_decoding_without_a_cache():
    network = toy(translator())
    model = Model(network, special_ids={"decoder_start_token_id": 2})
    sources = [[3, 4, 5, 6, 7, 8], [9, 1], [3, 4, 5, 6, 7, 8]]
    generations = model.generate_many(sources, max_new_tokens=10)
    for source, generation in zip(sources, generations, strict=True):
        encoder_output = network.encode(torch.tensor([source]))
        assert generation.tokens == list(
            decode_plainly(network, [2], SamplingOptions(max_new_tokens=10), encoder_output)
        )
        assert generation.prompt_tokens == source


def test_a_sequence_with_max_new_tokens_0_does_not_shift_the_sources_of_the_others():
    network = toy(translator())
    for encodes in (True, False):
        sequences = [TokenSequence([2], SamplingOptions(max_new_tokens=n), source=[3 + n, 9, 1]) for n in (0, 6, 0, 4)]
        encoder_output = encode_sources(network, [each.source for each in sequences]) if encodes else None
        run(network, sequences, encoder_output=encoder_output)
        for each in sequences:
            encoder_output = network.encode(torch.tensor([each.source]))
            assert each.tokens == list(decode_plainly(network, each.prompt, each.options, encoder_output))


def test_cross_attention_keys_are_computed_once_per_source():
    network = toy(translator())
    model = Model(network, special_ids={"decoder_start_token_id": 2})
    batch_sizes = []
    network.decoder.layers[0].cross_attention.key.register_forward_hook(
        lambda module, inputs, output: batch_sizes.append(len(inputs[0]))
    )
    model.generate_many([[3, 4, 5]], n=3, max_new_tokens=5, temperature=1.0, seed=1)
    assert batch_sizes == [1]


def test_logprobs_equal_those_of_one_forward_pass():
    network = toy(decoder())
    generation = Model(network).generate([1, 2, 3], max_new_tokens=6, logprobs=2)
    tokens = torch.tensor([[1, 2, 3, *generation.tokens]])
    with torch.no_grad():
        expected = network(tokens)[0, 2:-1].float().log_softmax(-1)
    assert generation.logprobs == pytest.approx(
        [expected[n, t].item() for n, t in enumerate(generation.tokens)], abs=1e-6
    )
    assert all(
        len(top) == 2 and max(top.values()) >= generation.logprobs[n] for n, top in enumerate(generation.top_logprobs)
    )


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_score_equals_one_forward_pass(chunk):
    network = toy(decoder())
    ids = [1, 5, 2, 9, 9, 3, 7, 4, 8, 6]
    with torch.no_grad():
        expected = network(torch.tensor([ids]))[0, :-1].float().log_softmax(-1)
    result = score(network, ids, chunk)
    assert result.logprobs == pytest.approx([expected[n, t].item() for n, t in enumerate(ids[1:])], abs=1e-6)
    assert result.perplexity == pytest.approx(torch.tensor(result.logprobs).mean().neg().exp().item())
    assert repr(result) == f"Score(10 tokens, perplexity {result.perplexity:.4g})"
    with pytest.raises(ClearheadError, match="fewer than two tokens"):
        score(network, [1])


def test_with_dynamic_scaling_a_text_is_scored_as_a_whole(tmp_path):
    """In chunks, each one would be rotated for another length."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=31, max_position_embeddings=16, rope_parameters=scaling, **sizes)
    theirs = transformers.LlamaForCausalLM(config).eval()
    randomize(theirs)
    ids = torch.randint(31, (40,)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    result = score(load_network(theirs, tmp_path), ids, chunk=10)
    assert result.logprobs == pytest.approx([expected[n, t].item() for n, t in enumerate(ids[1:])], abs=1e-5)


def test_with_dynamic_scaling_a_short_prompt_beside_a_long_one_continues_as_alone():
    network = tiny_network(rope=Rope(scaling=DynamicScaling(factor=4.0, original_context=4)))
    prompts = [[5, 2, 9], [1, 5, 2, 9, 9, 3, 7, 4, 8, 6, 3, 2, 2, 7, 1, 9, 8, 5]]

    def continuations(group):
        sequences = [TokenSequence(prompt, SamplingOptions(max_new_tokens=12)) for prompt in group]
        for _ in decode(network, sequences):
            pass
        return [sequence.tokens for sequence in sequences]

    assert continuations(prompts) == [continuations([prompt])[0] for prompt in prompts]
    with pytest.raises(ClearheadError, match="speculation would change the text"):
        decode_speculatively(network, TokenSequence(prompts[0], SamplingOptions(max_new_tokens=4)), "lookup")


@pytest.mark.parametrize("window", [None, 6])
def test_a_text_that_outgrows_the_original_context_of_longrope_is_read_again(window):
    network = tiny_network(rope=longrope(8), window=window)
    prompts = [[5, 2], [5, 2, 9, 4], [1, 5, 2, 9, 9, 3, 7, 4], [3, 2, 2, 7, 1, 9, 8, 5, 6, 6]]
    options = SamplingOptions(max_new_tokens=12)
    plain = [list(decode_plainly(network, prompt, options)) for prompt in prompts]
    for group in (slice(0, 1), slice(2, 3), slice(0, 4)):
        assert run(network, [TokenSequence(prompt, options) for prompt in prompts[group]]) == plain[group]
        beams = beam_search(network, prompts[group], BeamOptions(num_beams=1, max_new_tokens=12))
        assert [found[0].tokens for found in beams] == plain[group]


# --- stop strings and options


@pytest.fixture
def model():
    tokenizer = byte_tokenizer()
    return Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer)


def test_a_text_ends_before_a_stop_string(model):
    free = model.generate("Hello", max_new_tokens=60, temperature=1.0, seed=2)
    stop = free.text[20:23]
    stopped = model.generate("Hello", max_new_tokens=60, temperature=1.0, seed=2, stop=[stop])
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert len(stopped.tokens) < len(free.tokens)
    pieces = list(model.stream("Hello", max_new_tokens=60, temperature=1.0, seed=2, stop=[stop]))
    assert "".join(pieces) == stopped.text


def test_a_stop_string_before_min_new_tokens_does_not_end_the_text(model):
    free = model.generate("Hello", max_new_tokens=40, temperature=1.0, seed=2)
    late = model.generate("Hello", max_new_tokens=40, min_new_tokens=40, temperature=1.0, seed=2, stop=[free.text[5]])
    assert late.tokens == free.tokens


def test_a_stop_string_completed_at_min_new_tokens_ends_the_text(model):
    free = model.generate("Hello", max_new_tokens=40, temperature=1.0, seed=2)
    decode = model.tokenizer.decode
    start = next(n for n in range(5, 38) if decode(free.tokens[n : n + 2]).isascii())
    stop = decode(free.tokens[start : start + 2])
    options = {"max_new_tokens": 40, "min_new_tokens": start + 2, "temperature": 1.0, "seed": 2, "stop": stop}
    assert model.generate("Hello", **options).text == decode(free.tokens[:start])


def test_unknown_and_invalid_options_raise(model):
    with pytest.raises(ClearheadError, match="did you mean 'top_p'"):
        model.generate("x", topp=0.5)
    with pytest.raises(ClearheadError, match="n is 0"):
        model.generate_many(["x"], n=0)


def test_a_longer_prompt_in_the_batch_does_not_shorten_a_text():
    network = toy(shrink(preset("gpt2")))  # 32 positions
    sequences = [
        TokenSequence([1, 2], SamplingOptions(max_new_tokens=20)),
        TokenSequence([3] * 25, SamplingOptions(max_new_tokens=20)),
    ]
    alone = run(network, [TokenSequence([1, 2], SamplingOptions(max_new_tokens=20))])[0]
    assert run(network, sequences)[0] == alone
    assert [len(each.tokens) for each in sequences] == [20, 8]


def test_prompts_are_checked_when_decode_is_called():
    network = toy(shrink(preset("gpt2")))
    with pytest.raises(ClearheadError, match="token id 999 is out of range; this model has the ids 0 to"):
        decode(network, [TokenSequence([999], SamplingOptions())])
    with pytest.raises(ClearheadError, match="the text has 33 tokens; this model reads at most 32"):
        decode(network, [TokenSequence([1] * 33, SamplingOptions())])
    with pytest.raises(ClearheadError, match="stop_ids contains token 999"):
        decode(network, [TokenSequence([1], SamplingOptions(stop_ids=[999]))])
    with pytest.raises(ClearheadError, match="there is no prompt to continue"):
        decode(network, [])

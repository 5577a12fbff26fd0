"""The cached loop against the plain one, alone and in batches; texts, stops, chats."""

import pytest
import torch
import transformers

from clearhead.api import Model
from clearhead.architecture.parts import DynamicScaling, Rope
from clearhead.cache.cache import KeyValueCache
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.generation.decode import TokenSequence, decode, prefill
from clearhead.generation.plain import decode_plainly
from clearhead.generation.prompts import encode_sources
from clearhead.generation.score import score
from clearhead.options import SamplingOptions
from clearhead.tokenization.characters import byte_tokenizer
from tests.book.shrink import shrink
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import decoder, toy, translator
from tests.parity.harness import load_ours, rerandomize

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
DRAWN = {
    "greedy": {},
    "drawn": {"temperature": 1.3, "seed": 5},
    "filtered": {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "seed": 7},
    "penalised": {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "seed": 3},
}


@pytest.fixture(scope="module", params=DECODERS)
def network(request):
    return toy(shrink(preset(request.param)))


def run(network, rows, **options):
    for _ in decode(network, rows, **options):
        pass
    return [row.tokens for row in rows]


@pytest.mark.parametrize("how", DRAWN.values(), ids=DRAWN)
def test_cached_equals_plain(network, how):
    options = SamplingOptions(max_new_tokens=12, **how)
    for prompt in PROMPTS:
        assert run(network, [TokenSequence(prompt, options)]) == [list(decode_plainly(network, prompt, options))]


@pytest.mark.parametrize("how", DRAWN.values(), ids=DRAWN)
def test_a_row_does_not_feel_its_neighbours(network, how):
    """Rows of other lengths, other options and other ends."""
    rows = [TokenSequence(prompt, SamplingOptions(max_new_tokens=4 + 4 * n, **how)) for n, prompt in enumerate(PROMPTS)]
    alone = [run(network, [TokenSequence(row.prompt, row.options)])[0] for row in rows]
    assert run(network, rows) == alone


@pytest.mark.parametrize("piece", [1, 3, 5])
def test_reading_in_pieces_changes_nothing(network, piece, monkeypatch):
    options = SamplingOptions(max_new_tokens=8)
    alone = [run(network, [TokenSequence(prompt, options)])[0] for prompt in PROMPTS]
    monkeypatch.setattr("clearhead.generation.decode.PIECE", piece)
    assert run(network, [TokenSequence(prompt, options) for prompt in PROMPTS]) == alone


def test_what_needs_a_mask_is_read_in_pieces(monkeypatch):
    """Windows and padding; not where the length of the text turns its keys."""
    monkeypatch.setattr("clearhead.generation.decode.PIECE", 4)
    dynamic = Rope(scaling=DynamicScaling(factor=2.0, original_context=4))
    windowed, causal, turned = toy(shrink(preset("mistral-7b"))), tiny_network(), tiny_network(rope=dynamic)
    for network, prompts, sizes in (
        (windowed, PROMPTS[:1], [4, 3]),
        (causal, PROMPTS[:1], [7]),
        (causal, PROMPTS, [4, 3]),
        (turned, PROMPTS, [7]),
    ):
        read = []
        network.decoder.register_forward_pre_hook(lambda module, given, read=read: read.append(given[0].shape[1]))
        run(network, [TokenSequence(prompt, SamplingOptions(max_new_tokens=1)) for prompt in prompts])
        assert read == sizes


def test_each_row_goes_on_from_its_own_past(network):
    """Also where two go on in the same way."""
    options, pasts, next_tokens = SamplingOptions(max_new_tokens=5), [[3, 1, 4], [1, 5, 9]], [2, 6]
    cache = KeyValueCache(network.config)
    prefill(network, pasts, cache)
    found = run(network, [TokenSequence(next_tokens, options, earlier=past) for past in pasts], cache=cache)
    assert found == [run(network, [TokenSequence(past + next_tokens, options)])[0] for past in pasts]


def test_samples_of_one_prompt_share_its_reading():
    network = toy(decoder())
    read = []
    network.decoder.layers[0].register_forward_pre_hook(lambda module, inputs: read.append(tuple(inputs[0].shape[:2])))
    rows = [
        TokenSequence([1, 2, 3, 4], SamplingOptions(max_new_tokens=3, temperature=1.0, seed=seed)) for seed in range(5)
    ]
    run(network, rows)
    assert read == [(1, 4), (5, 1), (5, 1)]
    assert len({tuple(row.tokens) for row in rows}) > 1


def test_a_finished_row_leaves_the_batch():
    network = toy(decoder())
    sizes = []
    network.decoder.layers[0].register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    run(network, [TokenSequence([1, 2], SamplingOptions(max_new_tokens=count)) for count in (5, 1, 3, 0)])
    assert sizes == [1, 2, 2, 1, 1]


def test_learned_positions_end_a_text():
    network = toy(shrink(preset("gpt2")))  # 32 positions
    rows = [TokenSequence(list(range(20)), SamplingOptions(max_new_tokens=100))]
    run(network, rows)
    assert len(rows[0].tokens) == 13  # the last is chosen at position 31 and needs none of its own
    assert rows[0].finish_reason == "context"


def test_learned_positions_end_a_text_after_its_own_past():
    """However long the past of its neighbour is."""
    network = toy(shrink(preset("gpt2")))
    options, pasts, new = SamplingOptions(max_new_tokens=99), [[3] * 4, [1] * 20], [2, 6]
    cache = KeyValueCache(network.config)
    prefill(network, pasts, cache)
    found = run(network, [TokenSequence(new, options, earlier=past) for past in pasts], cache=cache)
    assert found == [run(network, [TokenSequence(past + new, options)])[0] for past in pasts]
    assert [len(tokens) for tokens in found] == [32 - 6 + 1, 32 - 22 + 1]


def test_an_encoder_decoder_answers_in_batches():
    network = toy(translator())
    model = Model(network, special_ids={"decoder_start_token_id": 2})
    sources = [[3, 4, 5, 6, 7, 8], [9, 1], [3, 4, 5, 6, 7, 8]]
    made = model.generate_many(sources, max_new_tokens=10)
    for source, one in zip(sources, made, strict=True):
        encoder_output = network.encode(torch.tensor([source]))
        assert one.tokens == list(decode_plainly(network, [2], SamplingOptions(max_new_tokens=10), encoder_output))
        assert one.prompt_tokens == source


def test_a_row_that_asks_for_no_token_leaves_its_neighbours_their_sources():
    network = toy(translator())
    rows = [TokenSequence([2], SamplingOptions(max_new_tokens=n), source=[3 + n, 9, 1]) for n in (0, 6, 0, 4)]
    run(network, rows, encoder_output=encode_sources(network, [row.source for row in rows]))
    for row in rows:
        encoder_output = network.encode(torch.tensor([row.source]))
        assert row.tokens == list(decode_plainly(network, row.prompt, row.options, encoder_output))


def test_the_cross_attention_is_remembered_once():
    network = toy(translator())
    model = Model(network, special_ids={"decoder_start_token_id": 2})
    read = []
    network.decoder.layers[0].cross_attention.key.register_forward_hook(lambda *seen: read.append(len(seen[1][0])))
    model.generate_many([[3, 4, 5]], n=3, max_new_tokens=5, temperature=1.0, seed=1)
    assert read == [1]


def test_logprobs_are_those_of_the_plain_forward():
    network = toy(decoder())
    made = Model(network).generate([1, 2, 3], max_new_tokens=6, logprobs=2)
    tokens = torch.tensor([[1, 2, 3, *made.tokens]])
    with torch.no_grad():
        expected = network(tokens)[0, 2:-1].float().log_softmax(-1)
    assert made.logprobs == pytest.approx([expected[n, t].item() for n, t in enumerate(made.tokens)], abs=1e-6)
    assert all(len(top) == 2 and max(top.values()) >= made.logprobs[n] for n, top in enumerate(made.top_logprobs))


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_score_is_the_plain_forward(chunk):
    network = toy(decoder())
    ids = [1, 5, 2, 9, 9, 3, 7, 4, 8, 6]
    with torch.no_grad():
        expected = network(torch.tensor([ids]))[0, :-1].float().log_softmax(-1)
    found = score(network, ids, chunk)
    assert found.logprobs == pytest.approx([expected[n, t].item() for n, t in enumerate(ids[1:])], abs=1e-6)
    assert found.perplexity == pytest.approx(torch.tensor(found.logprobs).mean().neg().exp().item())
    with pytest.raises(ClearheadError, match="fewer than two tokens"):
        score(network, [1])


def test_a_text_is_scored_as_one_where_its_length_turns_it(tmp_path):
    """In pieces each would be turned for another length (dynamic scaling)."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=31, max_position_embeddings=16, rope_parameters=scaling, **sizes)
    theirs = transformers.LlamaForCausalLM(config).eval()
    rerandomize(theirs, lambda name, tensor: None)
    ids = torch.randint(31, (40,)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    found = score(load_ours(theirs, tmp_path), ids, chunk=10)
    assert found.logprobs == pytest.approx([expected[n, t].item() for n, t in enumerate(ids[1:])], abs=1e-5)


# --- texts


@pytest.fixture
def text_generator():
    tokenizer = byte_tokenizer()
    return Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer)


def test_a_stop_string_ends_the_text_before_itself(text_generator):
    free = text_generator.generate("Hello", max_new_tokens=60, temperature=1.0, seed=2)
    stop = free.text[20:23]
    stopped = text_generator.generate("Hello", max_new_tokens=60, temperature=1.0, seed=2, stop=[stop])
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert len(stopped.tokens) < len(free.tokens)
    pieces = list(text_generator.stream("Hello", max_new_tokens=60, temperature=1.0, seed=2, stop=[stop]))
    assert "".join(pieces) == stopped.text


def test_minimum_length_holds_for_stop_strings(text_generator):
    free = text_generator.generate("Hello", max_new_tokens=40, temperature=1.0, seed=2)
    late = text_generator.generate(
        "Hello", max_new_tokens=40, min_new_tokens=40, temperature=1.0, seed=2, stop=[free.text[5]]
    )
    assert late.tokens == free.tokens


def test_a_stop_string_that_begins_before_the_minimum_length_ends_the_text(text_generator):
    free = text_generator.generate("Hello", max_new_tokens=40, temperature=1.0, seed=2)
    decode = text_generator.tokenizer.decode
    place = next(n for n in range(5, 38) if decode(free.tokens[n : n + 2]).isascii())
    stop = decode(free.tokens[place : place + 2])
    asked = {"max_new_tokens": 40, "min_new_tokens": place + 2, "temperature": 1.0, "seed": 2, "stop": stop}
    assert text_generator.generate("Hello", **asked).text == decode(free.tokens[:place])


def test_options_are_checked_by_name(text_generator):
    with pytest.raises(ClearheadError, match="did you mean 'top_p'"):
        text_generator.generate("x", topp=0.5)
    with pytest.raises(ClearheadError, match="n is 0"):
        text_generator.generate_many(["x"], n=0)


def test_a_longer_neighbour_does_not_shorten_a_text():
    network = toy(shrink(preset("gpt2")))  # 32 positions
    rows = [
        TokenSequence([1, 2], SamplingOptions(max_new_tokens=20)),
        TokenSequence([3] * 25, SamplingOptions(max_new_tokens=20)),
    ]
    alone = run(network, [TokenSequence([1, 2], SamplingOptions(max_new_tokens=20))])[0]
    assert run(network, rows)[0] == alone
    assert [len(row.tokens) for row in rows] == [20, 8]


def test_prompts_are_checked_before_the_network_runs():
    network = toy(shrink(preset("gpt2")))
    with pytest.raises(ClearheadError, match="token id 999 is out of range"):
        run(network, [TokenSequence([999], SamplingOptions())])
    with pytest.raises(ClearheadError, match="the text has 33 tokens; this model reads 32 at most"):
        run(network, [TokenSequence([1] * 33, SamplingOptions())])

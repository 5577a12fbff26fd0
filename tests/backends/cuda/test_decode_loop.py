"""The decode loop around the CUDA graph against the plain loop: same tokens, same cache, on a GPU or interpreted."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from clearhead.architecture import SlidingWindow
from clearhead.backends.cuda import decoder as decoder_module
from clearhead.backends.cuda.decoder import GraphDecoder
from clearhead.backends.cuda.launch import attention_workspace
from clearhead.cache import KeyValueCache, stores
from clearhead.errors import ClearheadError
from clearhead.generation import TokenSequence, cuda_graph, decode
from clearhead.generation.cuda_graph import can_decode_in_graph, decode_in_graph, is_cache_supported, is_supported
from clearhead.model import Transformer
from clearhead.options import SamplingOptions
from tests.backends.networks import GRAPH_NETWORKS, graph_network
from tests.model.toys import CONTEXT, VOCAB, redraw

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run_loop(loop, network, prompts, options):
    sequences = [TokenSequence(prompt, option) for prompt, option in zip(prompts, options, strict=True)]
    for _ in loop(network, sequences):
        pass
    return [sequence.tokens for sequence in sequences]


def continue_chat(loop, network, cache, cached_tokens, prompt, *, num_steps=None, **options):
    """Continue a cache as a chat does, and stop after `num_steps` steps or at the end."""
    sequence = TokenSequence(prompt, SamplingOptions(**options), cached_tokens=cached_tokens)
    steps = loop(network, [sequence], cache=cache)
    for _ in itertools.islice(steps, num_steps):
        pass
    steps.close()
    return sequence.tokens


class CopiedTokens:
    """Replaces AsyncTokens without a GPU: holds the tokens at the time of the copy."""

    def __init__(self, tokens):
        self.tokens = tokens.tolist()

    def result(self):
        return self.tokens


def workspace_of_one_span(attention, batch, device):
    states, num_finished = attention_workspace(attention, batch, device)
    return states[:, :1].contiguous(), num_finished


@pytest.fixture
def uncaptured(monkeypatch):
    """Let the loop run without a GPU: each step runs in Triton's interpreter when it is replayed."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_graph, "AsyncTokens", CopiedTokens)
        monkeypatch.setattr(
            GraphDecoder, "capture", lambda self: setattr(self, "graph", SimpleNamespace(replay=self.run_step))
        )
        monkeypatch.setattr(decoder_module, "attention_workspace", workspace_of_one_span)


# --- same tokens


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", GRAPH_NETWORKS)
def test_the_graph_generates_the_tokens_of_the_plain_loop(name, batch, temperature):
    network = graph_network(name, "cuda")
    prompts = [[number % VOCAB for number in range(1 + row, 9 + 2 * row)] for row in range(batch)]
    options = [
        SamplingOptions(max_new_tokens=20 + row, temperature=temperature, top_p=0.95, seed=row) for row in range(batch)
    ]
    sequences = [TokenSequence(prompt, option) for prompt, option in zip(prompts, options, strict=True)]
    assert can_decode_in_graph(network, sequences)
    assert run_loop(decode_in_graph, network, prompts, options) == run_loop(decode, network, prompts, options)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
def test_texts_that_exceed_the_initial_capacity_are_those_of_the_plain_loop(batch, monkeypatch):
    monkeypatch.setattr(cuda_graph, "INITIAL_NEW_TOKENS", 3)
    network = graph_network("llama-3.2-1b", "cuda")
    prompts = [[number % VOCAB for number in range(1 + row, 9 + 2 * row)] for row in range(batch)]
    options = [SamplingOptions(max_new_tokens=60, temperature=0.8, seed=row) for row in range(batch)]
    assert run_loop(decode_in_graph, network, prompts, options) == run_loop(decode, network, prompts, options)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[10], [CONTEXT], [10, CONTEXT - 2, CONTEXT]])
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_sequences_end_with_the_position_table(name, lengths):
    network = graph_network(name, "cuda")
    prompts = [[number % VOCAB for number in range(length)] for length in lengths]
    options = [SamplingOptions(max_new_tokens=1000)] * len(lengths)
    generated = run_loop(decode_in_graph, network, prompts, options)
    assert generated == run_loop(decode, network, prompts, options)
    assert [len(tokens) for tokens in generated] == [CONTEXT - length + 1 for length in lengths]


@pytest.mark.parametrize("prompts", [[[1, 2, 3, 4, 5]], [[1, 2, 3], [4, 5, 6, 7, 8]]])
def test_models_with_windows_process_long_prompts_in_chunks(prompts, uncaptured, monkeypatch):
    monkeypatch.setattr("clearhead.generation.decoding.PREFILL_CHUNK", 2)
    network, lengths = graph_network("gemma-3-1b", DEVICE), []
    options = [SamplingOptions(max_new_tokens=3)] * len(prompts)
    expected = run_loop(decode, network, prompts, options)
    hidden_states = network.hidden_states

    def record_length(tokens, *arguments, **options):
        lengths.append(tokens.shape[1])
        return hidden_states(tokens, *arguments, **options)

    monkeypatch.setattr(network, "hidden_states", record_length)
    assert run_loop(decode_in_graph, network, prompts, options) == expected
    assert lengths == [min(2, len(prompt) - start) for prompt in prompts for start in range(0, len(prompt), 2)]


def test_layers_with_different_windows_and_prompts_of_different_lengths(uncaptured):
    network = graph_network("gemma-3-1b", DEVICE)
    stack = network.config.decoder
    layers = [
        replace(layer, attention=replace(layer.attention, pattern=SlidingWindow(size=size)))
        for layer, size in zip(stack.layers, (2, 33), strict=True)
    ]
    network = Transformer(replace(network.config, decoder=replace(stack, layers=tuple(layers)))).to(DEVICE).eval()
    redraw(network)
    prompts = [[1], [number % VOCAB for number in range(32)], [3, 2, 1]]
    options = [SamplingOptions(max_new_tokens=3)] * 3
    assert run_loop(decode_in_graph, network, prompts, options) == run_loop(decode, network, prompts, options)


@pytest.mark.parametrize("loaded_in_inference_mode", [True, False])
def test_inference_mode_may_change_during_a_text(loaded_in_inference_mode, uncaptured, monkeypatch):
    """Weights that were created outside of inference mode can still be trained afterwards."""
    monkeypatch.setattr(cuda_graph, "INITIAL_NEW_TOKENS", 1)
    with torch.inference_mode(loaded_in_inference_mode):
        network = graph_network("llama-3.2-1b", DEVICE)
    sequence = TokenSequence([1, 2, 3], SamplingOptions(max_new_tokens=6))
    steps = decode_in_graph(network, [sequence])
    with torch.inference_mode(not loaded_in_inference_mode):
        next(steps)
    assert len(list(steps)) == 5
    assert [sequence.tokens] == run_loop(decode, network, [sequence.prompt], [sequence.options])
    if not loaded_in_inference_mode:
        network(torch.tensor([sequence.prompt], device=DEVICE)).sum().backward()


# --- continued caches


@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2"])
def test_the_turns_of_a_chat_continue_its_cache(name, uncaptured, monkeypatch):
    """Turns that run to the end, stop early or are truncated, and one in between that the plain loop decodes."""
    monkeypatch.setattr(cuda_graph, "INITIAL_NEW_TOKENS", 1)
    network = graph_network(name, DEVICE)
    caches = [KeyValueCache(network.config) for _ in range(2)]
    text = []
    for turn, num_steps in enumerate([None, 2, 1, None]):
        loops = (decode, decode if turn == 2 else decode_in_graph)
        prompt = [1 + turn, 2, 3]
        assert is_cache_supported(network, [TokenSequence(prompt, SamplingOptions(), cached_tokens=text)], caches[1])
        options = {"max_new_tokens": 3, "temperature": 0.7, "seed": turn, "num_steps": num_steps}
        expected, generated = (
            continue_chat(loop, network, cache, text, prompt, **options)
            for loop, cache in zip(loops, caches, strict=True)
        )
        assert generated == expected
        assert caches[1].length == caches[0].length == len(text) + len(prompt) + len(generated) - 1
        text = [*text, *prompt, *generated][: caches[0].length - (turn == 1)]
        for cache in caches:
            cache.truncate(len(text))
    for ours, theirs in zip(caches[1].stores, caches[0].stores, strict=True):
        for part, other in ((ours.key, theirs.key), (ours.value, theirs.value)):
            torch.testing.assert_close(part[:, :, : len(text)], other[:, :, : len(text)], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("failing_call", [6, 7])  # of two layers' keys and values, after as many at the beginning
def test_a_chat_can_continue_after_an_allocation_failed(failing_call, uncaptured, monkeypatch):
    monkeypatch.setattr(cuda_graph, "INITIAL_NEW_TOKENS", 1)
    network = graph_network("llama-3.2-1b", DEVICE)
    cache, sequence = KeyValueCache(network.config), TokenSequence([1, 2, 3], SamplingOptions(max_new_tokens=20))
    for store in cache.stores:
        store.capacity = 4
    grow, calls = stores.grow, itertools.count(1)

    def fail_once(*arguments):
        if next(calls) == failing_call:
            raise MemoryError
        return grow(*arguments)

    monkeypatch.setattr(stores, "grow", fail_once)
    with pytest.raises(MemoryError):
        list(decode_in_graph(network, [sequence], cache))
    text = [*sequence.prompt, *sequence.tokens]
    assert cache.length == len(text) > len(sequence.prompt)
    generated = continue_chat(decode_in_graph, network, cache, text, [4], max_new_tokens=3)
    expected = continue_chat(decode, network, KeyValueCache(network.config), [], [*text, 4], max_new_tokens=3)
    assert generated == expected


def test_only_a_contiguous_cache_of_one_sequence_in_the_networks_dtype_is_supported():
    network = graph_network("llama-3.2-1b")
    sequence = TokenSequence([1], SamplingOptions(), cached_tokens=[2, 3])
    cache = KeyValueCache(network.config)
    assert not is_cache_supported(network, [sequence], None)
    assert not is_cache_supported(network, [sequence], cache)
    with torch.no_grad():
        network(torch.tensor([[2, 3]]), cache=cache)
    cache.advance()
    assert is_cache_supported(network, [sequence], cache)
    assert not is_cache_supported(network, [sequence, sequence], cache)
    assert not is_cache_supported(network.bfloat16(), [sequence], cache)


# --- when the graph is used, and how large it is


def test_without_a_gpu_the_graph_is_not_used():
    assert not can_decode_in_graph(graph_network("llama-3.2-1b"), [TokenSequence([1], SamplingOptions())])


@pytest.mark.parametrize(
    ("options", "supported"),
    [
        ({"temperature": 0.5, "top_p": 0.9, "seed": 1, "logit_bias": {3: 1.0}, "min_new_tokens": 2}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"logprobs": 0}, False),
    ],
)
def test_penalties_and_log_probabilities_are_not_supported(options, supported):
    assert is_supported(TokenSequence([1], SamplingOptions(**options))) == supported


@pytest.fixture
def capacities(monkeypatch):
    """Collect the capacities of the decoders that the loop creates; each creation fails."""
    requested = []

    def fail(network, batch, capacity, choose, cache):
        requested.append(capacity)
        raise ClearheadError("no GPU here")

    monkeypatch.setattr(cuda_graph, "GraphDecoder", fail)
    return requested


def test_the_initial_capacity_does_not_grow_with_max_new_tokens(capacities):
    sequence = TokenSequence([1] * 5, SamplingOptions(max_new_tokens=10**6))
    with pytest.raises(ClearheadError, match="no GPU here"):
        next(decode_in_graph(graph_network("llama-3.2-1b"), [sequence]))
    assert capacities == [5 + cuda_graph.INITIAL_NEW_TOKENS + 2]


def test_finished_sequences_have_slots_until_the_last_one_finishes(capacities):
    """A long prompt with one new token beside a short prompt with many: both take the same number of steps."""
    sequences = [
        TokenSequence([1] * 50, SamplingOptions(max_new_tokens=1)),
        TokenSequence([1], SamplingOptions(max_new_tokens=40)),
    ]
    with pytest.raises(ClearheadError, match="no GPU here"):
        next(decode_in_graph(graph_network("llama-3.2-1b"), sequences))
    assert capacities == [50 + 40 + 2]


def test_the_capacity_is_limited_by_a_position_table(capacities):
    sequences = [TokenSequence([1] * length, SamplingOptions(max_new_tokens=1000)) for length in (20, CONTEXT)]
    with pytest.raises(ClearheadError, match="no GPU here"):
        next(decode_in_graph(graph_network("gpt2"), sequences))
    assert capacities == [CONTEXT + (CONTEXT - 20 + 1) + 2]


class CountingDecoder:
    """Replaces GraphDecoder: sequence r generates 10 r, 10 r + 1, ..., and the steps are counted."""

    num_steps = 0

    def __init__(self, network, batch, capacity, choose, cache):
        self.num_generated, self.capacity = torch.zeros(batch, dtype=torch.long), capacity

    def prefill(self, prompts, chunk_size):
        return torch.eye(VOCAB)[[10 * row for row in range(len(prompts))]]

    def start(self, tokens):
        self.token = tokens.clone()

    def replay_step(self):
        CountingDecoder.num_steps += 1
        self.token += 1
        return self.token


def test_two_steps_are_started_before_a_token_is_read(monkeypatch):
    monkeypatch.setattr(cuda_graph, "GraphDecoder", CountingDecoder)
    monkeypatch.setattr(cuda_graph, "AsyncTokens", CopiedTokens)
    sequences = [
        TokenSequence([1, 2], SamplingOptions(max_new_tokens=4)),
        TokenSequence([3], SamplingOptions(max_new_tokens=2)),
    ]
    for number, _ in enumerate(decode_in_graph(graph_network("llama-3.2-1b"), sequences)):
        assert CountingDecoder.num_steps == number + 2
    assert [sequence.tokens for sequence in sequences] == [[0, 1, 2, 3], [10, 11]]

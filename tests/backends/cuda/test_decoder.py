"""The CUDA graph against the plain loop, on a GPU; its step by Triton's interpreter and what it refuses, anywhere."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from clearhead.architecture import LayerNorm, LearnedPositions, SinusoidalPositions, SlidingWindow
from clearhead.backends.cuda import decoder as cuda
from clearhead.backends.cuda.decoder import GraphDecoder
from clearhead.backends.cuda.launch import attention_workspace
from clearhead.backends.live_checks import unsupported_network_reason
from clearhead.backends.lowering import merge_weights
from clearhead.backends.modules import pack_network
from clearhead.cache import stores
from clearhead.cache.key_value_cache import KeyValueCache
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.generation import TokenSequence, decode
from clearhead.generation import cuda_graph as graph
from clearhead.generation.cuda_graph import decode_in_graph, can_decode_in_graph, is_supported, is_cache_supported
from clearhead.model.transformer import Transformer
from clearhead.options import SamplingOptions
from tests.book.shrink import shrink
from tests.model.toys import CONTEXT, VOCAB, redraw

gpu = pytest.mark.gpu
ANY_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOYS = ("llama-3.2-1b", "gpt2", "opt", "bare", "qwen3-8b", "mistral-7b", "gemma-3-1b")


def network_of(name, device="cpu", **changes):
    torch.manual_seed(0)
    network = Transformer(with_attention(shrink(preset(name)), **changes))
    redraw(network)
    return network.to(device).eval()


def toy(name, device="cpu"):
    """Two layers of a preset, of OPT, or without whatever may be left out."""
    config = with_attention(shrink(preset("gpt2" if name in ("opt", "bare") else name)), head_width=16)
    stack = config.decoder
    if name == "opt":
        positions = LearnedPositions(num_positions=CONTEXT, offset=2)
        stack = changed(stack, positions, stack.layers[0].norm, stack.final_norm, "relu")
    if name == "bare":
        stack = changed(stack, SinusoidalPositions(), LayerNorm(epsilon=1e-5, bias=False), None, "gelu")
    network = Transformer(replace(config, decoder=replace(stack, layers=stack.layers[:2])))
    redraw(network)
    return network.to(device).eval()


def changed(stack, positions, norm, final_norm, activation):
    feed_forward = replace(stack.layers[0].feed_forward, activation=activation)
    layers = tuple(replace(layer, norm=norm, feed_forward=feed_forward) for layer in stack.layers)
    return replace(stack, embedding=replace(stack.embedding, positions=positions), layers=layers, final_norm=final_norm)


def with_attention(config, **changes):
    layers = [replace(layer, attention=replace(layer.attention, **changes)) for layer in config.output_stack.layers]
    return replace(config, decoder=replace(config.decoder, layers=tuple(layers))) if changes else config


def run(loop, network, prompts, options):
    rows = [TokenSequence(prompt, option) for prompt, option in zip(prompts, options, strict=True)]
    for _ in loop(network, rows):
        pass
    return [row.tokens for row in rows]


class Step:
    """A decoder's logits, one advance after the other and without a graph."""

    def __init__(self, network, prompts, capacity=CONTEXT + 4):
        self.decoder = GraphDecoder(network, len(prompts), capacity, self.choose)
        if network.device.type == "cpu":  # one span of the cache: the interpreter runs programs one by one
            states, arrivals = self.decoder.workspace
            self.decoder.workspace = states[:, :1].contiguous(), arrivals
        self.texts = [list(prompt) for prompt in prompts]
        self.decoder.token.copy_(self.decoder.prefill(prompts).argmax(-1))

    def choose(self, logits, steps):
        self.logits = logits
        return logits.argmax(-1)

    def advance(self):
        self.texts = [[*text, token] for text, token in zip(self.texts, self.decoder.token.tolist(), strict=True)]
        self.decoder.run_step()
        return self.logits

    def error(self):
        """Beside the network's own, relative."""
        expected = self.decoder.network(torch.tensor(self.texts, device=self.logits.device))[:, -1]
        return (self.logits - expected).norm() / expected.norm()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("bits", "num_rows"), [(None, 1), (None, 3), ("int8", 1), ("int4", 3)])
@pytest.mark.parametrize("name", TOYS)
@torch.no_grad()
def test_a_step_gives_the_logits_of_the_network(name, bits, num_rows):
    """Packed, x may be rounded to eight bits on one side alone."""
    pytest.importorskip("triton", reason="Triton is not installed")
    network = toy(name, ANY_DEVICE)
    assert unsupported_network_reason(network, "cuda") is None
    if bits is not None:
        pack_network(network, bits)
    step = Step(network, [[row, 1, 2, 3] for row in range(num_rows)])
    step.advance()
    assert step.error() < (1e-4 if bits is None else 0.04)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_a_table_of_positions_is_not_read_beyond_its_end():
    pytest.importorskip("triton", reason="Triton is not installed")
    step = Step(toy("opt", ANY_DEVICE), [[number % VOCAB for number in range(CONTEXT - 1)]])
    step.advance()
    assert step.error() < 1e-4
    assert step.advance().isfinite().all()
    assert step.decoder.position.tolist() == [CONTEXT + 1]


@gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", TOYS)
def test_the_graph_makes_the_tokens_of_the_loop(name, num_rows, temperature):
    network = toy(name, "cuda")
    prompts = [[number % VOCAB for number in range(1 + row, 9 + 2 * row)] for row in range(num_rows)]
    options = [
        SamplingOptions(max_new_tokens=20 + row, temperature=temperature, top_p=0.95, seed=row)
        for row in range(num_rows)
    ]
    assert can_decode_in_graph(network, [TokenSequence(prompt, option) for prompt, option in zip(prompts, options, strict=True)])
    assert run(decode_in_graph, network, prompts, options) == run(decode, network, prompts, options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_a_cache_that_is_full_grows():
    pytest.importorskip("triton", reason="Triton is not installed")
    step = Step(toy("llama-3.2-1b", ANY_DEVICE), [[5, 1, 2, 3], [6, 4, 7, 2]], capacity=5)
    step.advance()
    step.decoder.capture = lambda: None
    step.decoder.double_capacity()
    step.advance()
    assert step.error() < 1e-4
    assert {(layer.keys.shape[2], len(layer.cosine)) for layer in step.decoder.layers} == {(10, 10)}


@pytest.mark.parametrize("name", ["gemma-3-1b", "gpt2"])
def test_angles_are_kept_once_and_counted(name):
    decoder = GraphDecoder(toy(name, ANY_DEVICE), 2, 8, lambda logits, steps: logits.argmax(-1))
    parts = [part for layer in decoder.layers for part in (layer.keys, layer.values, layer.cosine, layer.sine)]
    storages = {part.data_ptr(): part.nbytes for part in (*parts, *decoder.workspace)}
    assert decoder.num_bytes == sum(storages.values())


def turn(loop, network, cache, earlier, prompt, **options):
    """What a chat does: go on with a cache, and listen to the end or not."""
    residuals = options.pop("residuals", None)
    row = TokenSequence(prompt, SamplingOptions(**options), cached_tokens=earlier)
    turns = loop(network, [row], cache=cache)
    for _ in itertools.islice(turns, residuals):
        pass
    turns.close()
    return row.tokens


@pytest.fixture
def anywhere(monkeypatch):
    """The loop around the graph without a GPU: steps as they are asked for, by Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if ANY_DEVICE == "cpu":
        monkeypatch.setattr(graph, "AsyncTokens", Copied)
        monkeypatch.setattr(
            GraphDecoder, "capture", lambda self: setattr(self, "graph", SimpleNamespace(replay=self.run_step))
        )
        monkeypatch.setattr(cuda, "attention_workspace", one_span)


def one_span(attention, batch, device):
    states, arrivals = attention_workspace(attention, batch, device)
    return states[:, :1].contiguous(), arrivals


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2"])
def test_turns_of_a_chat_go_on_with_its_cache(name, anywhere, monkeypatch):
    """Heard to the end, left in the middle, cut back, and in between one that the loop has to take."""
    monkeypatch.setattr(graph, "INITIAL_NEW_TOKENS", 1)
    network = toy(name, ANY_DEVICE)
    caches = [KeyValueCache(network.config) for _ in range(2)]
    text = []
    for number, residuals in enumerate([None, 2, 1, None]):
        loops = (decode, decode if number == 2 else decode_in_graph)
        prompt = [1 + number, 2, 3]
        assert is_cache_supported(network, [TokenSequence(prompt, SamplingOptions(), cached_tokens=text)], caches[1])
        given = {"max_new_tokens": 3, "temperature": 0.7, "seed": number, "residuals": residuals}
        expected, made = (
            turn(loop, network, cache, text, prompt, **given) for loop, cache in zip(loops, caches, strict=True)
        )
        assert made == expected
        assert caches[1].length == caches[0].length == len(text) + len(prompt) + len(made) - 1
        text = [*text, *prompt, *made][: caches[0].length - (number == 1)]
        for cache in caches:
            cache.truncate(len(text))
    for ours, theirs in zip(caches[1].stores, caches[0].stores, strict=True):
        for part, other in ((ours.key, theirs.key), (ours.value, theirs.value)):
            torch.testing.assert_close(part[:, :, : len(text)], other[:, :, : len(text)], atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("loaded", [True, False])
def test_inference_mode_may_begin_and_end_anywhere(loaded, anywhere, monkeypatch):
    """As the network is loaded, or in the middle of a text; weights that could be trained still can."""
    monkeypatch.setattr(graph, "INITIAL_NEW_TOKENS", 1)
    with torch.inference_mode(loaded):
        network = toy("llama-3.2-1b", ANY_DEVICE)
    row = TokenSequence([1, 2, 3], SamplingOptions(max_new_tokens=6))
    turns = decode_in_graph(network, [row])
    with torch.inference_mode(not loaded):
        next(turns)
    assert len(list(turns)) == 5
    assert [row.tokens] == run(decode, network, [row.prompt], [row.options])
    if not loaded:
        network(torch.tensor([row.prompt], device=ANY_DEVICE)).sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("prompts", [[[1, 2, 3, 4, 5]], [[1, 2, 3], [4, 5, 6, 7, 8]]])
def test_long_prompts_are_read_in_pieces_by_windows(prompts, anywhere, monkeypatch):
    monkeypatch.setattr("clearhead.generation.decoding.PREFILL_CHUNK", 2)
    network, lengths = toy("gemma-3-1b", ANY_DEVICE), []
    options = [SamplingOptions(max_new_tokens=3)] * len(prompts)
    expected = run(decode, network, prompts, options)
    hidden = network.hidden_states
    monkeypatch.setattr(
        network,
        "hidden_states",
        lambda tokens, *inputs, **options: lengths.append(tokens.shape[1]) or hidden(tokens, *inputs, **options),
    )
    assert run(decode_in_graph, network, prompts, options) == expected
    assert lengths == [min(2, len(prompt) - start) for prompt in prompts for start in range(0, len(prompt), 2)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_layers_with_windows_of_their_own_and_rows_of_other_lengths(anywhere):
    network = toy("gemma-3-1b", ANY_DEVICE)
    stack = network.config.decoder
    layers = [
        replace(layer, attention=replace(layer.attention, pattern=SlidingWindow(size=size)))
        for layer, size in zip(stack.layers, (2, 33), strict=True)
    ]
    network = Transformer(replace(network.config, decoder=replace(stack, layers=tuple(layers)))).to(ANY_DEVICE).eval()
    redraw(network)
    prompts = [[1], [number % VOCAB for number in range(32)], [3, 2, 1]]
    options = [SamplingOptions(max_new_tokens=3)] * 3
    assert run(decode_in_graph, network, prompts, options) == run(decode, network, prompts, options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("number", [6, 7])  # of two layers' keys and values, after as many at the beginning
def test_a_chat_goes_on_after_memory_ran_out(number, anywhere, monkeypatch):
    monkeypatch.setattr(graph, "INITIAL_NEW_TOKENS", 1)
    network = toy("llama-3.2-1b", ANY_DEVICE)
    cache, row = KeyValueCache(network.config), TokenSequence([1, 2, 3], SamplingOptions(max_new_tokens=20))
    for store in cache.stores:
        store.capacity = 4
    grown, calls = stores.grown, itertools.count(1)

    def run_out(*given):
        if next(calls) == number:
            raise MemoryError
        return grown(*given)

    monkeypatch.setattr(stores, "grown", run_out)
    with pytest.raises(MemoryError):
        list(decode_in_graph(network, [row], cache))
    held = [*row.prompt, *row.tokens]
    assert cache.length == len(held) > len(row.prompt)
    made = turn(decode_in_graph, network, cache, held, [4], max_new_tokens=3)
    assert made == turn(decode, network, KeyValueCache(network.config), [], [*held, 4], max_new_tokens=3)


def test_a_past_that_the_graph_does_not_hold_is_left_to_the_loop():
    network = toy("llama-3.2-1b")
    row, cache = TokenSequence([1], SamplingOptions(), cached_tokens=[2, 3]), KeyValueCache(network.config)
    assert not is_cache_supported(network, [row], None)
    assert not is_cache_supported(network, [row], cache)
    with torch.no_grad():
        network(torch.tensor([[2, 3]]), cache=cache)
    cache.advance()
    assert is_cache_supported(network, [row], cache)
    assert not is_cache_supported(network, [row, row], cache)
    assert not is_cache_supported(network.bfloat16(), [row], cache)


@gpu
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_text_longer_than_expected_is_that_of_the_loop(num_rows, monkeypatch):
    monkeypatch.setattr(graph, "INITIAL_NEW_TOKENS", 3)
    network = toy("llama-3.2-1b", "cuda")
    prompts = [[number % VOCAB for number in range(1 + row, 9 + 2 * row)] for row in range(num_rows)]
    options = [SamplingOptions(max_new_tokens=60, temperature=0.8, seed=row) for row in range(num_rows)]
    assert run(decode_in_graph, network, prompts, options) == run(decode, network, prompts, options)


def test_a_text_that_may_be_long_has_room_for_a_short_one(asked):
    with pytest.raises(ClearheadError, match="no GPU here"):
        next(decode_in_graph(toy("llama-3.2-1b"), [TokenSequence([1] * 5, SamplingOptions(max_new_tokens=10**6))]))
    assert asked == [5 + graph.INITIAL_NEW_TOKENS + 2]


@gpu
@pytest.mark.parametrize("lengths", [[10], [CONTEXT], [10, CONTEXT - 2, CONTEXT]])
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_rows_end_with_the_table_of_positions(name, lengths):
    network = toy(name, "cuda")
    prompts = [[number % VOCAB for number in range(length)] for length in lengths]
    options = [SamplingOptions(max_new_tokens=1000)] * len(lengths)
    made = run(decode_in_graph, network, prompts, options)
    assert made == run(decode, network, prompts, options)
    assert [len(tokens) for tokens in made] == [CONTEXT - length + 1 for length in lengths]


@gpu
@pytest.mark.parametrize("num_rows", [1, 3, 20])  # in kernels, in kernels, in PyTorch
@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2", "opt"])
@torch.no_grad()
def test_packed_weights_give_the_logits_of_the_network(name, bits, num_rows):
    """But for x, which the kernels round to eight bits."""
    prompts = [[row, 1, 2, 3] for row in range(num_rows)]
    step = Step(pack_network(toy(name, "cuda"), bits), prompts)
    chosen = step.advance().argmax(-1).tolist()
    assert step.error() < (
        0.04 if num_rows <= step.decoder.max_kernel_rows else 1e-4
    )  # PyTorch's products round nothing
    step.decoder.start(step.decoder.prefill(prompts).argmax(-1))  # the same step, captured
    assert step.decoder.replay_step().tolist() == chosen


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "llama-4-scout", "qwen3-30b-a3b", "t5-small", "gpt1", "gpt3-125m", "bloom-7b1", "palm-8b"]
)
def test_other_models_are_left_to_the_loop(name):
    network = network_of(name)
    assert unsupported_network_reason(network, "cuda")
    with pytest.raises(ClearheadError, match="cannot run in a CUDA graph"):
        GraphDecoder(network, 1, 16, lambda logits, steps: logits.argmax(-1))


def test_without_a_gpu_the_loop_is_used():
    assert not can_decode_in_graph(toy("llama-3.2-1b"), [TokenSequence([1], SamplingOptions())])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"head_width": 16, "num_heads": 32, "num_kv_heads": 1}, "more than 16 query heads"),
        ({"head_width": 12}, "power of two"),
    ],
)
def test_heads_beyond_a_tile_are_left_to_the_loop(change, sentence):
    assert sentence in unsupported_network_reason(network_of("llama-3.2-1b", **change), "cuda")


def test_altered_networks_are_left_to_the_loop():
    assert "float64" in unsupported_network_reason(toy("llama-3.2-1b").double(), "cuda")
    mixed = toy("llama-3.2-1b")
    mixed.decoder.layers[1].bfloat16()
    assert "several dtypes" in unsupported_network_reason(mixed, "cuda")
    hooked = toy("llama-3.2-1b")
    hooked.decoder.final_norm.register_forward_hook(lambda *given: None)
    assert "have hooks" in unsupported_network_reason(hooked, "cuda")
    assert unsupported_network_reason(pack_network(toy("llama-3.2-1b"), "int8"), "cuda") is None
    network = toy("llama-3.2-1b")
    network.decoder.layers[0].register_forward_hook(lambda *given: None)
    assert "have hooks" in unsupported_network_reason(network, "cuda")


@pytest.fixture
def asked(monkeypatch):
    """How much room a decoder is asked to have, of which there is none here."""
    found = []

    def refuse(network, batch, capacity, choose, cache):
        found.append(capacity)
        raise ClearheadError("no GPU here")

    monkeypatch.setattr(graph, "GraphDecoder", refuse)
    return found


def test_a_row_that_is_done_has_room_until_the_last_one_is(asked):
    """A long prompt with one token beside a short one with many: both take as many steps."""
    rows = [
        TokenSequence([1] * 50, SamplingOptions(max_new_tokens=1)),
        TokenSequence([1], SamplingOptions(max_new_tokens=40)),
    ]
    with pytest.raises(ClearheadError, match="no GPU here"):
        next(decode_in_graph(toy("llama-3.2-1b"), rows))
    assert asked == [50 + 40 + 2]


def test_no_room_is_made_beyond_a_table_of_positions(asked):
    rows = [TokenSequence([1] * length, SamplingOptions(max_new_tokens=1000)) for length in (20, CONTEXT)]
    with pytest.raises(ClearheadError, match="no GPU here"):
        next(decode_in_graph(toy("gpt2"), rows))
    assert asked == [CONTEXT + (CONTEXT - 20 + 1) + 2]


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"temperature": 0.5, "top_p": 0.9, "seed": 1, "logit_bias": {3: 1.0}, "min_new_tokens": 2}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"logprobs": 0}, False),
    ],
)
def test_what_looks_back_is_left_to_the_loop(options, plain):
    row = TokenSequence([1], SamplingOptions(**options))
    assert is_supported(row) == plain


class Counting:
    """In the place of the graph: row r says 10 r, 10 r + 1, …"""

    asked = 0

    def __init__(self, network, batch, capacity, choose, cache):
        self.num_generated, self.capacity = torch.zeros(batch, dtype=torch.long), capacity

    def prefill(self, prompts, num_at_once):
        return torch.eye(VOCAB)[[10 * row for row in range(len(prompts))]]

    def start(self, tokens):
        self.token = tokens.clone()

    def replay_step(self):
        Counting.asked += 1
        self.token += 1
        return self.token


class Copied:
    """In the place of a mailbox: what stood in the buffer when it was posted."""

    def __init__(self, tokens):
        self.tokens = tokens.tolist()

    def result(self):
        return self.tokens


def test_two_tokens_are_in_flight(monkeypatch):
    monkeypatch.setattr(graph, "GraphDecoder", Counting)
    monkeypatch.setattr(graph, "AsyncTokens", Copied)
    rows = [
        TokenSequence([1, 2], SamplingOptions(max_new_tokens=4)),
        TokenSequence([3], SamplingOptions(max_new_tokens=2)),
    ]
    for number, _ in enumerate(decode_in_graph(toy("llama-3.2-1b"), rows)):
        assert Counting.asked == number + 2
    assert [row.tokens for row in rows] == [[0, 1, 2, 3], [10, 11]]


@pytest.mark.parametrize("bits", [None, "int8"])
def test_matrices_are_merged_once(bits):
    network = toy("llama-3.2-1b")
    if bits is not None:
        pack_network(network, bits)
    attention = network.decoder.layers[0].attention
    first, second = (merge_weights((attention.query, attention.key, attention.value)) for _ in range(2))
    first, second = (first, second) if bits is None else (first.quants, second.quants)
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, second)

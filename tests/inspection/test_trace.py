"""Test that a trace equals the forward pass that it recorded, for every kind of attention and norm placement."""

import threading
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead.api import Model, RecurrentBaseline
from clearhead.architecture import (
    Alibi,
    Chunked,
    Dropout,
    DynamicScaling,
    QueryTemperature,
    RelativeSinusoid,
    Rope,
    ScoreTemperature,
    SlidingWindow,
)
from clearhead.data import Batch
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.inspection import ablate, patch, trace_batch, trace_generation, trace_recurrent
from clearhead.inspection.recording import RecordingTransformer, StackInputs
from clearhead.inspection.tracing import MAX_TOKENS, record
from clearhead.model.masks import Mask
from clearhead.model.mixture import RouterLayer
from clearhead.model.recurrent import RecurrentConfig, RecurrentTranslator
from clearhead.tokenization.characters import byte_tokenizer
from tests.model.toys import VOCAB, RecordingKernel, assert_close, decoder, redraw, some_tokens, toy, translator
from tests.toy_presets import shrink

FAMILIES = (
    "gpt2", "gpt3-175b", "gopher-280b", "palm-540b", "llama-3.1-8b", "mistral-7b", "smollm3-3b", "qwen3-30b-a3b",
    "gemma-3-1b", "deepseek-v2", "deepseek-v3", "llama-4-scout", "grok-1", "grok-2", "bloom-560m", "mpt-7b",
    "bert-base", "t5-small", "bart-base", "marian", "transformer-base", "pythia-160m", "olmo-2-1b", "gpt-oss-20b",
)  # fmt: skip
TOKENS, SOURCE = [3, 14, 15, 9, 2, 6, 5, 3, 14, 8], [2, 7, 18, 28, 1, 8, 2]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return Model(toy(shrink(preset(request.param))))


def source_for(model):
    return SOURCE if model.config.is_encoder_decoder else None


@torch.no_grad()
def record_kernel(network, tokens=TOKENS, source=SOURCE, **options):
    """Run a forward pass; return the kernel that recorded its calls, and the indices of the calls by attention kind.

    The encoder layers come first, then self- and cross-attention of the decoder layers alternate.
    """
    kernel, target = RecordingKernel(), torch.tensor([tokens])
    if network.config.is_encoder_decoder:
        network(torch.tensor([source]), target, kernel=kernel, **options)
        start = len(network.encoder.layers)
        calls = {"encoder": range(start), "decoder": range(start, 10**6, 2), "cross": range(start + 1, 10**6, 2)}
    else:
        network(target, kernel=kernel, **options)
        calls = {"self": range(10**6)}
    return kernel, calls


def test_scores_weights_and_values_equal_those_of_the_forward_pass(model):
    traced = model.trace(TOKENS, source_for(model))
    kernel, calls = record_kernel(model.network)
    for kind, numbers in calls.items():
        stack = None if kind in ("self", "cross") else kind
        for layer in range(traced.num_layers_of(stack)):
            steps = kernel.steps[numbers[layer]]
            if kind == "cross":
                assert_close(traced.cross_attention(layer), steps.weights[0])
                assert_close(traced.cross_attention(layer, head=-1, rows=[4]), steps.weights[0, -1, [4]])
                continue
            assert_close(traced.attention(layer, stack=stack), steps.weights[0])
            assert_close(traced.scores(layer, stack=stack), steps.scores[0])
            assert_close(traced.attention(layer, 2, rows=[5, -1, 0], stack=stack), steps.weights[0, 2, [5, -1, 0]])
            assert_close(traced.scores(layer, 1, stack=stack), steps.scores[0, 1])
            allowed = traced.allowed(layer, stack)
            assert torch.equal(allowed, (steps.weights[0] > 0).any(dim=0))
            values = kernel.values[numbers[layer]].repeat_interleave(4 // kernel.values[numbers[layer]].shape[1], dim=1)
            assert_close(traced.values(layer, 3, stack), values[0, 3])


def test_a_replay_of_some_positions_equals_that_of_all(model):
    positions = torch.tensor([8, 2])
    for keeps in (False, True):
        traced = model.trace(TOKENS, source_for(model), keep_residuals=keeps)
        assert len(traced.residuals[traced.resolve_stack(None)]) == traced.num_layers + 1 or not keeps
        for layer in range(traced.num_layers):
            with torch.no_grad():
                full, part = traced.replay(layer), traced.replay(layer).at(positions)
                assert_close(part.attention, full.attention[:, positions])
                assert_close(part.feed_forward, full.feed_forward[:, positions])
            assert_close(traced.residual_middle(layer, positions=positions), traced.residual_middle(layer)[positions])


SCORE_CHANGES = {
    "score temperature": {"temperature": ScoreTemperature(length=3), "softcap": 1.5},
    "query temperature": {"temperature": QueryTemperature(floor=2, scale=0.7), "clip": 0.8},
    "dynamic rope": {"position": Rope(scaling=DynamicScaling(factor=4.0, original_context=4))},
    "window": {"pattern": SlidingWindow(size=3), "position": Alibi()},
    "chunk": {"pattern": Chunked(size=4), "position": RelativeSinusoid()},
}


@pytest.mark.parametrize("name", SCORE_CHANGES)
def test_temperatures_softcaps_patterns_and_biases_are_in_the_scores(name):
    model = Model(toy(decoder(**SCORE_CHANGES[name])))
    traced, (kernel, _) = model.trace(TOKENS), record_kernel(model.network)
    for layer, steps in enumerate(kernel.steps):
        assert_close(traced.scores(layer), steps.scores[0])
        assert_close(traced.attention(layer, 1, rows=[2, 9]), steps.weights[0, 1, [2, 9]])


def test_branch_outputs_add_up_to_the_next_residual_stream(model):
    traced = model.trace(TOKENS, source_for(model))
    for stack in traced.residuals:
        for layer in range(traced.num_layers_of(stack)):
            stream, block = traced.residual(layer, stack), traced.replay(layer, stack).block
            added = traced.attention_output(layer, stack)
            has_cross_attention = block.layer.cross_attention is not None
            if block.layer.placement == "post":
                middle = block.attention_residual.norm(stream + added)
                if has_cross_attention:
                    middle = block.cross_attention_residual.norm(middle + traced.cross_attention_output(layer))
                assert_close(traced.residual_middle(layer, stack), middle)
                after = block.feed_forward_residual.norm(middle + traced.feed_forward_output(layer, stack))
            else:
                added = added + traced.cross_attention_output(layer) if has_cross_attention else added
                assert_close(traced.residual_middle(layer, stack), stream + added)
                after = traced.residual_middle(layer, stack) + traced.feed_forward_output(layer, stack)
            assert_close(after, traced.residual(layer + 1, stack))


@torch.no_grad()
def test_logits_equal_those_of_the_network(model):
    traced = model.trace(TOKENS, source_for(model))
    inputs = (torch.tensor([SOURCE]),) if model.config.is_encoder_decoder else ()
    expected = model.network(*inputs, torch.tensor([TOKENS]))[0]
    assert_close(traced.logits, expected)
    assert_close(traced.rerun(-1), expected[-1])
    assert_close(traced.logits_at(2), expected[2])


def test_routing_equals_that_of_the_forward_pass(model):
    routers = [part for part in model.network.modules() if isinstance(part, RouterLayer)]
    outputs = []
    hooks = [router.register_forward_hook(lambda module, inputs, out: outputs.append(out)) for router in routers]
    traced = model.trace(TOKENS, source_for(model))
    for hook in hooks:
        hook.remove()
    for layer in range(traced.num_layers):
        if not hasattr(traced.replay(layer).block.feed_forward, "router"):
            with pytest.raises(ClearheadError, match="no router"):
                traced.routing(layer)
            continue
        weights, experts = outputs.pop(0)
        routing = traced.routing(layer)
        dense = torch.zeros(len(TOKENS), 8, dtype=weights.dtype)
        assert_close(dense.scatter(1, routing.experts, routing.weights), dense.scatter(1, experts, weights))
        assert (routing.weights.diff(dim=-1) <= 0).all()
    assert not outputs


def test_a_traced_generation_equals_the_trace_of_its_tokens(model):
    if model.config.decoder is None:
        with pytest.raises(ClearheadError, match="cannot generate texts"):
            trace_generation(model.text_generator, SOURCE)
        return
    generated = trace_generation(model.text_generator, SOURCE, max_new_tokens=7, temperature=1.0, seed=3)
    answer = model.generate(SOURCE, max_new_tokens=7, temperature=1.0, seed=3).tokens
    assert generated.tokens[-6:] == answer[:-1]
    full = model.trace(generated.tokens, source_for(model))
    for layer in range(generated.num_layers):
        assert_close(generated.residual(layer + 1), full.residual(layer + 1), 1e-10)
        assert_close(generated.attention(layer), full.attention(layer), 1e-10)
        if generated.source_tokens:
            assert_close(generated.cross_attention(layer), full.cross_attention(layer), 1e-10)


def training_batch(tokens, **fields):
    return Batch(tokens=tokens, targets=tokens, **fields)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-1b", "bloom-560m", "gopher-280b", "t5-small", "deepseek-v3"])
@torch.no_grad()
def test_trace_of_a_padded_sequence_in_a_batch(name):
    network, tokens = toy(shrink(preset(name))), some_tokens()
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    if network.config.is_encoder_decoder:
        source_mask = mask.flip(1)
        traced = trace_batch(network, training_batch(tokens, source=tokens.flip(1), source_mask=source_mask), row=1)
        kernel = RecordingKernel()
        network(tokens.flip(1), tokens, source_mask, kernel=kernel)
        assert_close(traced.attention(1, stack="encoder")[:, :5], kernel.steps[1].weights[1, :, :5])
        assert_close(traced.cross_attention(0), kernel.steps[len(network.encoder.layers) + 1].weights[1])
        return
    traced, kernel = trace_batch(network, training_batch(tokens, mask=mask), row=-1), RecordingKernel()
    network(tokens, mask, kernel=kernel)
    for layer in range(traced.num_layers):
        assert_close(traced.attention(layer)[:, 3:], kernel.steps[layer].weights[1, :, 3:])
        assert not traced.allowed(layer)[:, :3].any()


@torch.no_grad()
def test_trace_of_packed_documents_with_separate_positions():
    network, tokens = toy(shrink(preset("llama-3.1-8b"))), some_tokens()
    documents = torch.tensor([[0] * 8, [0, 0, 0, 1, 1, 1, 1, 1]])
    positions = torch.tensor([list(range(8)), [0, 1, 2, 0, 1, 2, 3, 4]])
    traced, kernel = (
        trace_batch(network, training_batch(tokens, documents=documents, positions=positions), row=1),
        RecordingKernel(),
    )
    network(tokens, position_ids=positions, documents=documents, kernel=kernel)
    for layer in range(traced.num_layers):
        assert_close(traced.attention(layer), kernel.steps[layer].weights[1])
    assert not traced.allowed(0)[3:, :3].any()


def test_trace_during_training_has_no_dropout_and_no_gradient():
    network = toy(replace(decoder(), dropout=Dropout(residual=0.5, attention=0.5, embedding=0.5))).train()
    batch = training_batch(some_tokens())
    first, again = trace_batch(network, batch), trace_batch(network, batch)
    assert network.training
    assert all(part.training for part in network.modules())
    assert_close(first.residual(2), again.residual(2), 0.0)
    assert not first.residual(2).requires_grad
    assert_close(first.logits_at(3), again.rerun(3), 1e-12)
    assert_close(first.residual(1), first.residual_middle(0) + first.feed_forward_output(0))
    weights = first.attention(1)
    network(batch.tokens).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    torch.optim.SGD(network.parameters(), lr=1.0).step()
    assert_close(first.attention(1), weights, 0.0)


def test_trace_of_a_compiled_network():
    """The trace runs a compiled graph with the fused kernel, and a second trace needs no new one."""
    network, graphs = toy(decoder(position=Rope())), []
    plain = Model(network).trace(TOKENS)

    def backend(graph, examples):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    network.decoder.compile(backend=backend)
    with torch.no_grad():
        network.hidden_states(torch.tensor([TOKENS]))
    before = len(graphs)
    for _ in range(2):
        traced = Model(network).trace(TOKENS)
        for depth in range(traced.num_layers + 1):
            assert_close(traced.residual(depth), plain.residual(depth))
        assert_close(traced.attention(1), plain.attention(1))
        assert len(graphs) == before + 1
    assert sum("scaled_dot_product_attention" in call for call in graphs[-1]) == traced.num_layers


class OperationRecorder(TorchDispatchMode):
    """Record all operations with the shape of their result."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.operations.append((str(operation), getattr(result, "shape", None)))
        return result


@torch.no_grad()
def test_a_trace_adds_no_operations_to_the_forward_pass_but_views():
    """Beyond the forward pass, a trace selects the sequence from the batch: one view of each recorded stream."""
    model, tokens = Model(toy(decoder(position=Rope()))), torch.tensor([TOKENS])
    with OperationRecorder() as plain:
        model.network.hidden_states(tokens)
    with OperationRecorder() as traced:
        record(model.network, StackInputs(tokens))
    assert len(plain.operations) > 50
    assert traced.operations[: len(plain.operations)] == plain.operations
    assert traced.operations[len(plain.operations) :] == [("aten.select.int", (10, 16))] * 2 + [
        ("aten.select.int", (10,))
    ]


def test_recomputed_residuals_are_bit_equal(model):
    """The order of the requests and the number of layers in between do not matter."""
    source = source_for(model)
    traced, full = model.trace(TOKENS, source), model.trace(TOKENS, source, keep_heads=True)
    for stack, states in full.residuals.items():
        depths = range(full.num_layers_of(stack) + 1)
        assert list(states) == list(depths)
        assert len(traced.residuals[stack]) < len(depths)
        for depth in (*depths, *reversed(depths)):
            assert torch.equal(traced.residual(depth, stack), states[depth])


def test_only_every_square_root_th_residual_is_recorded():
    config = decoder(position=Rope())
    network = toy(replace(config, decoder=replace(config.decoder, layers=config.decoder.layers * 5)))
    traced = Model(network).trace(TOKENS)
    assert list(traced.residuals["decoder"]) == [0, 4, 8, 10]
    recorder = RecordingTransformer(network)
    with torch.no_grad():
        recorder.hidden_states(torch.tensor([TOKENS]))
    for depth in (7, 9, 1, 2, 3, 10, 6):
        assert torch.equal(traced.residual(depth), recorder.residuals["decoder"][depth][0][0])


def test_other_threads_are_neither_recorded_nor_changed():
    """Another thread runs the network on another text in the middle of each forward pass."""
    network = toy(decoder(position=Rope()))
    other_tokens, other_logits = torch.tensor([SOURCE]), []
    with torch.no_grad():
        expected_logits = network(other_tokens)
    plain = Model(network).trace(TOKENS)
    expected = plain.residual(0), plain.residual(2), plain.logits_at(-1), ablate(plain, layer=1, head=2).divergence

    def run_other_thread(module, inputs, out):
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=lambda: other_logits.append(forward()))
            other.start()
            other.join()

    @torch.no_grad()
    def forward():
        return network(other_tokens)

    network.decoder.layers[0].register_forward_hook(run_other_thread)
    traced = Model(network).trace(TOKENS)
    values = traced.residual(0), traced.residual(2), traced.logits_at(-1)
    for value, expected_value in zip(values, expected[:3], strict=True):
        assert_close(value, expected_value, 0.0)
    generated = trace_generation(Model(network).text_generator, SOURCE, max_new_tokens=4, temperature=0.0)
    assert len(generated.residual(0)) == len(generated.tokens) == len(SOURCE) + 3
    num_runs = len(other_logits)
    assert ablate(traced, layer=1, head=2).divergence == expected[3] > 0
    patch(traced, Model(network).trace(TOKENS[::-1]), layer=1, patched_positions=[2])
    assert len(other_logits) > num_runs
    for logits in other_logits:
        assert_close(logits, expected_logits, 0.0)


def test_token_texts_and_representations():
    model = Model(
        toy(replace(decoder(), decoder=replace(decoder().decoder, embedding=embedding_of(300)))), byte_tokenizer()
    )
    traced = model.trace("né", keep_heads=True)
    assert traced.token_texts[-3:] == ["n", "\\xc3", "\\xa9"]
    assert model.trace([299]).token_texts == ["299"]
    text = "".join(traced.token_texts)
    assert repr(traced) == f"Trace({text!r}, {len(traced.tokens)} tokens, 2 layers, heads kept)"
    assert repr(model.trace([1] * 99)).endswith("…', 99 tokens, 2 layers, heads recomputed on request)")
    assert traced._repr_html_().startswith("<iframe")


def embedding_of(vocab_size):
    return replace(decoder().decoder.embedding, vocab_size=vocab_size)


def test_token_types_change_the_trace():
    network = toy(shrink(preset("bert-base")))
    plain, typed = (
        record(network, StackInputs(torch.tensor([TOKENS]), token_types=types))
        for types in (None, torch.ones(1, 10).long())
    )
    assert (plain.attention(0) - typed.attention(0)).abs().max() > 1e-3


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@torch.no_grad()
def test_trace_of_the_recurrent_baseline(cell):
    sizes = {"source_vocab_size": VOCAB, "target_vocab_size": VOCAB, "embedding_width": 8, "width": 16, "context": 32}
    network = RecurrentTranslator(RecurrentConfig(**sizes, cell=cell, attention="dot_product", dropout=0.5))
    redraw(network)
    traced = trace_recurrent(network, SOURCE, TOKENS)
    with pytest.raises(ClearheadError, match="this model is a recurrent network"):
        trace_generation(RecurrentBaseline(network).text_generator, SOURCE)
    network.eval()
    encoder_output = network.encode(torch.tensor([SOURCE]))
    states = network.hidden_states(torch.tensor([TOKENS]), encoder_output)[0, :-1]
    assert_close(traced.cross_attention(), (states @ encoder_output.states[0].T).softmax(dim=-1), 1e-6)
    assert_close(traced.cross_attention(rows=[-1]), traced.alignments[[-1]], 0.0)
    assert_close(traced.logits, network(torch.tensor([SOURCE]), torch.tensor([TOKENS]))[0], 1e-6)


WRONG = {
    "layer 2 is out of range: there are 2, from 0 to 1": lambda traced: traced.attention(2),
    "layer -3 is out of range": lambda traced: traced.scores(-3, 0),
    "layer 3 is out of range: .* or from -3 to -1 .the last one: after all layers": lambda traced: traced.residual(3),
    "head 4 is out of range: there are 4, from 0 to 3": lambda traced: traced.attention(0, 4),
    "head 1.5 is not an integer from 0 to 3": lambda traced: traced.attention(0, 1.5),
    "layer '0' is not an integer": lambda traced: traced.attention("0"),
    "head 9 is out of range": lambda traced: traced.values(0, 9),
    "row 10 is out of range": lambda traced: traced.attention(0, 1, rows=[10]),
    "position 10 is out of range": lambda traced: traced.logits_at(10),
    "position -11 is out of range": lambda traced: traced.rerun(-11),
    "no cross-attention": lambda traced: traced.cross_attention(0),
    "unknown stack 'encoder'": lambda traced: traced.attention(0, stack="encoder"),
    "'trace.bin' has an unsupported extension; use .safetensors": lambda traced: traced.save("trace.bin"),
    "the folder 'none' does not exist": lambda traced: traced.save("none/trace.safetensors"),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_raise(message):
    traced = Model(toy(decoder())).trace(TOKENS)
    with pytest.raises(ClearheadError, match=message):
        WRONG[message](traced)


def test_texts_that_cannot_be_traced_raise():
    model, encoder_decoder = Model(toy(decoder())), Model(toy(translator()))
    with pytest.raises(
        ClearheadError,
        match=r"100,000 tokens are too many for a trace; give at most 32,768, for example tokens\[-32768:\]",
    ):
        model.trace([1] * 100_000)
    with pytest.raises(ClearheadError, match="too many"):
        encoder_decoder.trace([1], source=[1] * (MAX_TOKENS + 1))
    with pytest.raises(ClearheadError, match="needs a source"):
        encoder_decoder.trace(TOKENS)
    with pytest.raises(ClearheadError, match="has no encoder and reads the text only"):
        model.trace(TOKENS, SOURCE)
    with pytest.raises(ClearheadError, match="token id 29 is out of range"):
        model.trace([29])
    with pytest.raises(ClearheadError, match="leave out beams"):
        trace_generation(model.text_generator, TOKENS, beams=2)
    with pytest.raises(ClearheadError, match="max_new_tokens must be at least 1"):
        trace_generation(model.text_generator, TOKENS, max_new_tokens=0)


def test_too_many_scores_in_one_request_raise(monkeypatch):
    monkeypatch.setattr("clearhead.inspection.attention_heads.MAX_SCORES", 350)
    traced = Model(toy(decoder())).trace(TOKENS)
    assert traced.attention(0, 0).shape == (10, 10)
    with pytest.raises(
        ClearheadError, match=r"needs 400 scores at once, more than 350; request one head with rows=range\(10\)"
    ):
        traced.attention(0)


def test_a_model_without_vocabulary_head_has_no_logits():
    network = toy(replace(decoder(), head=None))
    with pytest.raises(ClearheadError, match="no vocabulary head"):
        Model(network).trace(TOKENS).logits  # noqa: B018


def test_the_mask_of_one_row_is_not_computed_for_all_rows():
    traced = Model(toy(decoder(), torch.float32)).trace([1] * 30)
    assert traced.self_heads(0).scoring.mask == Mask(causal=True)
    assert traced.self_heads(0).select(0, torch.tensor([7])).scoring.mask.allowed.shape == (1, 1, 1, 30)


def test_a_long_heading_is_cut_between_words_if_there_are_any():
    record = Model(toy(decoder())).trace([1])
    assert replace(record, token_texts=["word "] * 16).heading == "word " * 16
    assert replace(record, token_texts=["longer words "] * 16).heading == "longer words " * 5 + "longer words…"
    assert replace(record, token_texts=["字"] * 81).heading == "字" * 79 + "…"

"""A trace against the forward it was made of: every kind of attention, placement and text."""

import threading
from dataclasses import replace
from types import SimpleNamespace

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
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.inspection.ablation import ablate
from clearhead.inspection.patching import patch
from clearhead.inspection.record import Inputs, Listening
from clearhead.inspection.recurrent import trace_recurrent
from clearhead.inspection.tracing import MAX_TOKENS, record, trace_generation, trace_row
from clearhead.model.masks import Mask
from clearhead.model.mixture import RouterLayer
from clearhead.model.recurrent import RecurrentConfig, RecurrentTranslator
from clearhead.tokenization.characters import byte_tokenizer
from tests.book.shrink import shrink
from tests.model.toys import VOCAB, Spy, close, decoder, redraw, some_tokens, toy, translator

FAMILIES = (
    "gpt2", "gpt3-175b", "gopher-280b", "palm-540b", "llama-3.1-8b", "mistral-7b", "smollm3-3b", "qwen3-30b-a3b",
    "gemma-3-1b", "deepseek-v2", "deepseek-v3", "llama-4-scout", "grok-1", "grok-2", "bloom-560m", "mpt-7b",
    "bert-base", "t5-small", "bart-base", "marian", "transformer-base",
)  # fmt: skip
TOKENS, SOURCE = [3, 14, 15, 9, 2, 6, 5, 3, 14, 8], [2, 7, 18, 28, 1, 8, 2]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return Model(toy(shrink(preset(request.param))))


def source_for(model):
    return SOURCE if model.config.is_encoder_decoder else None


@torch.no_grad()
def spied(network, tokens=TOKENS, source=SOURCE, **options):
    """What the layers gave to their kernel, in the order of the forward: the encoder's, then by turns self, cross."""
    spy, target = Spy(), torch.tensor([tokens])
    if network.config.is_encoder_decoder:
        network(torch.tensor([source]), target, kernel=spy, **options)
        spent = len(network.encoder.layers)
        order = {"encoder": range(spent), "decoder": range(spent, 10**6, 2), "cross": range(spent + 1, 10**6, 2)}
    else:
        network(target, kernel=spy, **options)
        order = {"self": range(10**6)}
    return spy, order


def test_scores_weights_and_values_are_those_of_the_forward(model):
    traced = model.trace(TOKENS, source_for(model))
    spy, order = spied(model.network)
    for kind, numbers in order.items():
        stack = None if kind in ("self", "cross") else kind
        for layer in range(traced.num_layers_of(stack)):
            residuals = spy.attended[numbers[layer]]
            if kind == "cross":
                close(traced.cross_attention(layer), residuals.weights[0])
                close(traced.cross_attention(layer, head=-1, rows=[4]), residuals.weights[0, -1, [4]])
                continue
            close(traced.attention(layer, stack=stack), residuals.weights[0])
            close(traced.scores(layer, stack=stack), residuals.scores[0])
            close(traced.attention(layer, 2, rows=[5, -1, 0], stack=stack), residuals.weights[0, 2, [5, -1, 0]])
            close(traced.scores(layer, 1, stack=stack), residuals.scores[0, 1])
            allowed = traced.allowed(layer, stack)
            assert torch.equal(allowed, (residuals.weights[0] > 0).any(dim=0))
            values = spy.values[numbers[layer]].repeat_interleave(4 // spy.values[numbers[layer]].shape[1], dim=1)
            close(traced.values(layer, 3, stack), values[0, 3])


TWISTS = {
    "score temperature": {"temperature": ScoreTemperature(length=3), "softcap": 1.5},
    "query temperature": {"temperature": QueryTemperature(floor=2, scale=0.7), "clip": 0.8},
    "dynamic rope": {"position": Rope(scaling=DynamicScaling(factor=4.0, original_context=4))},
    "window": {"pattern": SlidingWindow(size=3), "position": Alibi()},
    "chunk": {"pattern": Chunked(size=4), "position": RelativeSinusoid()},
}


@pytest.mark.parametrize("twist", TWISTS)
def test_what_few_models_do_with_their_scores(twist):
    model = Model(toy(decoder(**TWISTS[twist])))
    traced, (spy, _) = model.trace(TOKENS), spied(model.network)
    for layer, residuals in enumerate(spy.attended):
        close(traced.scores(layer), residuals.scores[0])
        close(traced.attention(layer, 1, rows=[2, 9]), residuals.weights[0, 1, [2, 9]])


def test_branches_add_up_to_the_next_stream(model):
    traced = model.trace(TOKENS, source_for(model))
    for stack in traced.states:
        for layer in range(traced.num_layers_of(stack)):
            stream, block = traced.residual(layer, stack), traced.replay(layer, stack).block
            added = traced.attention_output(layer, stack)
            across = block.layer.cross_attention is not None
            if block.layer.placement == "post":
                middle = block.attention_residual.norm(stream + added)
                if across:
                    middle = block.cross_attention_residual.norm(middle + traced.cross_attention_output(layer))
                close(traced.middle(layer, stack), middle)
                after = block.feed_forward_residual.norm(middle + traced.feed_forward(layer, stack))
            else:
                added = added + traced.cross_attention_output(layer) if across else added
                close(traced.middle(layer, stack), stream + added)
                after = traced.middle(layer, stack) + traced.feed_forward(layer, stack)
            close(after, traced.residual(layer + 1, stack))


@torch.no_grad()
def test_logits_are_the_network_s(model):
    traced = model.trace(TOKENS, source_for(model))
    inputs = (torch.tensor([SOURCE]),) if model.config.is_encoder_decoder else ()
    expected = model.network(*inputs, torch.tensor([TOKENS]))[0]
    close(traced.logits, expected)
    close(traced.run_again(-1), expected[-1])
    close(traced.logits_at(2), expected[2])


def test_router_choices_are_those_of_the_forward(model):
    routers = [part for part in model.network.modules() if isinstance(part, RouterLayer)]
    residuals = []
    hooks = [router.register_forward_hook(lambda module, given, out: residuals.append(out)) for router in routers]
    traced = model.trace(TOKENS, source_for(model))
    for hook in hooks:
        hook.remove()
    for layer in range(traced.num_layers):
        if not hasattr(traced.replay(layer).block.feed_forward, "router"):
            with pytest.raises(ClearheadError, match="no router"):
                traced.router(layer)
            continue
        weights, experts = residuals.pop(0)
        found = traced.router(layer)
        dense = torch.zeros(len(TOKENS), 8, dtype=weights.dtype)
        close(dense.scatter(1, found.experts, found.weights), dense.scatter(1, experts, weights))
        assert (found.weights.diff(dim=-1) <= 0).all()
    assert not residuals


def test_a_cached_decode_gives_the_rows_of_the_whole(model):
    if model.config.decoder is None:
        with pytest.raises(ClearheadError, match="does not generate"):
            trace_generation(model.text_generator, SOURCE)
        return
    made = trace_generation(model.text_generator, SOURCE, max_new_tokens=7, temperature=1.0, seed=3)
    answer = model.generate(SOURCE, max_new_tokens=7, temperature=1.0, seed=3).tokens
    assert made.tokens[-6:] == answer[:-1]
    whole = model.trace(made.tokens, source_for(model))
    for layer in range(made.num_layers):
        close(made.residual(layer + 1), whole.residual(layer + 1), 1e-10)
        close(made.attention(layer), whole.attention(layer), 1e-10)
        if made.source_tokens:
            close(made.cross_attention(layer), whole.cross_attention(layer), 1e-10)


def rows(tokens, **given):
    nothing = dict.fromkeys(("mask", "documents", "positions", "source", "source_mask"))
    return SimpleNamespace(**(nothing | {"tokens": tokens} | given))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-1b", "bloom-560m", "gopher-280b", "t5-small", "deepseek-v3"])
@torch.no_grad()
def test_a_padded_row_of_a_batch(name):
    network, tokens = toy(shrink(preset(name))), some_tokens()
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    if network.config.is_encoder_decoder:
        source_mask = mask.flip(1)
        traced = trace_row(network, rows(tokens, source=tokens.flip(1), source_mask=source_mask), row=1)
        spy = Spy()
        network(tokens.flip(1), tokens, source_mask, kernel=spy)
        close(traced.attention(1, stack="encoder")[:, :5], spy.attended[1].weights[1, :, :5])
        close(traced.cross_attention(0), spy.attended[len(network.encoder.layers) + 1].weights[1])
        return
    traced, spy = trace_row(network, rows(tokens, mask=mask), row=-1), Spy()
    network(tokens, mask, kernel=spy)
    for layer in range(traced.num_layers):
        close(traced.attention(layer)[:, 3:], spy.attended[layer].weights[1, :, 3:])
        assert not traced.allowed(layer)[:, :3].any()


@torch.no_grad()
def test_packed_documents_with_positions_of_their_own():
    network, tokens = toy(shrink(preset("llama-3.1-8b"))), some_tokens()
    documents = torch.tensor([[0] * 8, [0, 0, 0, 1, 1, 1, 1, 1]])
    positions = torch.tensor([list(range(8)), [0, 1, 2, 0, 1, 2, 3, 4]])
    traced, spy = trace_row(network, rows(tokens, documents=documents, positions=positions), row=1), Spy()
    network(tokens, position_ids=positions, documents=documents, kernel=spy)
    for layer in range(traced.num_layers):
        close(traced.attention(layer), spy.attended[layer].weights[1])
    assert not traced.allowed(0)[3:, :3].any()


def test_in_the_middle_of_training():
    network = toy(replace(decoder(), dropout=Dropout(residual=0.5, attention=0.5, embedding=0.5))).train()
    batch = rows(some_tokens())
    first, again = trace_row(network, batch), trace_row(network, batch)
    assert network.training
    assert all(part.training for part in network.modules())
    close(first.residual(2), again.residual(2), 0.0)
    assert not first.residual(2).requires_grad
    close(first.logits_at(3), again.run_again(3), 1e-12)
    close(first.residual(1), first.middle(0) + first.feed_forward(0))
    weights = first.attention(1)
    network(batch.tokens).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    torch.optim.SGD(network.parameters(), lr=1.0).step()
    close(first.attention(1), weights, 0.0)


def test_with_compile_on():
    """The graph that ran is a compiled one, with the fused kernel in it; a second trace needs no other."""
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
            close(traced.residual(depth), plain.residual(depth))
        close(traced.attention(1), plain.attention(1))
        assert len(graphs) == before + 1
    assert sum("scaled_dot_product_attention" in call for call in graphs[-1]) == traced.num_layers


class Counter(TorchDispatchMode):
    """Operations, with the shape of what they give."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = operation(*args, **(kwargs or {}))
        self.operations.append((str(operation), getattr(given, "shape", None)))
        return given


@torch.no_grad()
def test_an_unasked_layer_costs_not_one_operation():
    """Beyond those of the forward, a trace takes the row out of the batch: a view of each stream it keeps."""
    model, tokens = Model(toy(decoder(position=Rope()))), torch.tensor([TOKENS])
    with Counter() as plain:
        model.network.hidden_states(tokens)
    with Counter() as traced:
        record(model.network, Inputs(tokens))
    assert len(plain.operations) > 50
    assert traced.operations[: len(plain.operations)] == plain.operations
    assert traced.operations[len(plain.operations) :] == [("aten.select.int", (10, 16))] * 2 + [
        ("aten.select.int", (10,))
    ]


def test_what_is_made_anew_is_what_was(model):
    """To the last bit, in whatever order it is asked for, and from as many streams as there are layers between."""
    source = source_for(model)
    traced, whole = model.trace(TOKENS, source), model.trace(TOKENS, source, keep_heads=True)
    for stack, states in whole.states.items():
        depths = range(whole.num_layers_of(stack) + 1)
        assert list(states) == list(depths)
        assert len(traced.states[stack]) < len(depths)
        for depth in (*depths, *reversed(depths)):
            assert torch.equal(traced.residual(depth, stack), states[depth])


def test_few_streams_are_kept_of_many_layers():
    config = decoder(position=Rope())
    network = toy(replace(config, decoder=replace(config.decoder, layers=config.decoder.layers * 5)))
    traced = Model(network).trace(TOKENS)
    assert list(traced.states["decoder"]) == [0, 4, 8, 10]
    listening = Listening(network)
    with torch.no_grad():
        listening.hidden_states(torch.tensor([TOKENS]))
    for depth in (7, 9, 1, 2, 3, 10, 6):
        assert torch.equal(traced.residual(depth), listening.residuals["decoder"][depth][0][0])


def test_who_else_runs_the_network_is_neither_heard_nor_changed():
    """Another thread reads another text while this one is in the middle of its own."""
    network = toy(decoder(position=Rope()))
    others, residuals = torch.tensor([SOURCE]), []
    with torch.no_grad():
        alone = network(others)
    plain = Model(network).trace(TOKENS)
    expected = plain.residual(0), plain.residual(2), plain.logits_at(-1), ablate(plain, layer=1, head=2).divergence

    def meanwhile(module, given, out):
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=lambda: residuals.append(read_by_another()))
            other.start()
            other.join()

    @torch.no_grad()
    def read_by_another():
        return network(others)

    network.decoder.layers[0].register_forward_hook(meanwhile)
    traced = Model(network).trace(TOKENS)
    found = traced.residual(0), traced.residual(2), traced.logits_at(-1)
    for value, before in zip(found, expected[:3], strict=True):
        close(value, before, 0.0)
    made = trace_generation(Model(network).text_generator, SOURCE, max_new_tokens=4, temperature=0.0)
    assert len(made.residual(0)) == len(made.tokens) == len(SOURCE) + 3
    with_change = len(residuals)
    assert ablate(traced, layer=1, head=2).divergence == expected[3] > 0
    patch(traced, Model(network).trace(TOKENS[::-1]), layer=1, places=[2])
    assert len(residuals) > with_change
    for read in residuals:
        close(read, alone, 0.0)


def test_texts():
    model = Model(
        toy(replace(decoder(), decoder=replace(decoder().decoder, embedding=embedding_of(300)))), byte_tokenizer()
    )
    traced = model.trace("né", keep_heads=True)
    assert traced.token_texts[-3:] == ["n", "\\xc3", "\\xa9"]
    assert model.trace([299]).token_texts == ["299"]
    assert repr(traced) == f"Trace({len(traced.tokens)} tokens, 2 layers)"
    assert traced._repr_html_().startswith("<iframe")


def embedding_of(vocab_size):
    return replace(decoder().decoder.embedding, vocab_size=vocab_size)


def test_token_types_are_read():
    network = toy(shrink(preset("bert-base")))
    plain, typed = (
        record(network, Inputs(torch.tensor([TOKENS]), token_types=types)) for types in (None, torch.ones(1, 10).long())
    )
    assert (plain.attention(0) - typed.attention(0)).abs().max() > 1e-3


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@torch.no_grad()
def test_alignments_of_the_recurrent_baseline(cell):
    sizes = {"source_vocab_size": VOCAB, "target_vocab_size": VOCAB, "embedding_width": 8, "width": 16, "context": 32}
    network = RecurrentTranslator(RecurrentConfig(**sizes, cell=cell, attention="dot_product", dropout=0.5))
    redraw(network)
    traced = trace_recurrent(network, SOURCE, TOKENS)
    with pytest.raises(ClearheadError, match="this model is a recurrent network"):
        trace_generation(RecurrentBaseline(network).text_generator, SOURCE)
    network.eval()
    encoder_output = network.encode(torch.tensor([SOURCE]))
    states = network.hidden_states(torch.tensor([TOKENS]), encoder_output)[0, :-1]
    close(traced.cross_attention(), (states @ encoder_output.states[0].T).softmax(dim=-1), 1e-6)
    close(traced.cross_attention(rows=[-1]), traced.alignments[[-1]], 0.0)
    close(traced.logits, network(torch.tensor([SOURCE]), torch.tensor([TOKENS]))[0], 1e-6)


WRONG = {
    "layer 2 is out of range: there are 2, from 0 to 1": lambda traced: traced.attention(2),
    "layer -3 is out of range": lambda traced: traced.scores(-3, 0),
    "layer 3 is out of range: there are 3, from 0 to 2 .the last: after all layers": lambda traced: traced.residual(3),
    "head 4 is out of range: there are 4, from 0 to 3": lambda traced: traced.attention(0, 4),
    "head 1.5 is no whole number from 0 to 3": lambda traced: traced.attention(0, 1.5),
    "layer '0' is no whole number": lambda traced: traced.attention("0"),
    "head 9 is out of range": lambda traced: traced.values(0, 9),
    "row 10 is out of range": lambda traced: traced.attention(0, 1, rows=[10]),
    "position 10 is out of range": lambda traced: traced.logits_at(10),
    "position -11 is out of range": lambda traced: traced.run_again(-11),
    "no cross-attention": lambda traced: traced.cross_attention(0),
    "unknown stack 'encoder'": lambda traced: traced.attention(0, stack="encoder"),
    "'trace.bin' says no kind of file; give a name that ends in .safetensors": lambda traced: traced.save("trace.bin"),
    "there is no folder 'none'": lambda traced: traced.save("none/trace.safetensors"),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_questions(message):
    traced = Model(toy(decoder())).trace(TOKENS)
    with pytest.raises(ClearheadError, match=message):
        WRONG[message](traced)


def test_wrong_texts():
    model, across = Model(toy(decoder())), Model(toy(translator()))
    with pytest.raises(
        ClearheadError, match=r"100,000 tokens is too long; give at most 32,768, such as tokens\[-32768:\]"
    ):
        model.trace([1] * 100_000)
    with pytest.raises(ClearheadError, match="too long"):
        across.trace([1], source=[1] * (MAX_TOKENS + 1))
    with pytest.raises(ClearheadError, match="needs a source"):
        across.trace(TOKENS)
    with pytest.raises(ClearheadError, match="only an encoder-decoder takes a source"):
        model.trace(TOKENS, SOURCE)
    with pytest.raises(ClearheadError, match="token id 29 is out of range"):
        model.trace([29])
    with pytest.raises(ClearheadError, match="leave out beams"):
        trace_generation(model.text_generator, TOKENS, beams=2)
    with pytest.raises(ClearheadError, match="max_new_tokens must be at least 1"):
        trace_generation(model.text_generator, TOKENS, max_new_tokens=0)


def test_too_many_scores_at_once(monkeypatch):
    monkeypatch.setattr("clearhead.inspection.heads.MAX_SCORES", 350)
    traced = Model(toy(decoder())).trace(TOKENS)
    assert traced.attention(0, 0).shape == (10, 10)
    with pytest.raises(ClearheadError, match=r"asks for 400 scores at once; ask for one head with rows=range\(10\)"):
        traced.attention(0)


def test_an_encoder_without_head_has_no_logits():
    network = toy(replace(decoder(), head=None))
    with pytest.raises(ClearheadError, match="no vocabulary head"):
        Model(network).trace(TOKENS).logits  # noqa: B018


def test_mask_of_one_row_needs_no_square():
    """What is computed for one row does not grow with the square of the text."""
    traced = Model(toy(decoder(), torch.float32)).trace([1] * 30)
    assert traced.self_heads(0).how.mask == Mask(causal=True)
    assert traced.self_heads(0).only(0, torch.tensor([7])).how.mask.allowed.shape == (1, 1, 1, 30)

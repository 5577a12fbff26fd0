"""One forward of training: half precision, recomputation and compilation change the cost, not the meaning."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from clearhead.data.batch import IGNORED, Batch
from clearhead.model.attend import Scoring, fused_attention, reference_attention
from clearhead.model.masks import Mask
from clearhead.model.recurrent import RecurrentConfig, RecurrentTranslator
from clearhead.training import objective
from clearhead.training.config import TrainConfig
from clearhead.training.distributed import World
from clearhead.training.learner import Learner
from clearhead.training.loop import train
from clearhead.training.objective import InBfloat16, build_objective
from tests.model.toys import VOCAB, decoder, some_tokens, toy, translator
from tests.training.recipes import quiet, recipe

BATCH = Batch(tokens=some_tokens(), targets=some_tokens(seed=2))
PAIRS = Batch(
    tokens=some_tokens(),
    targets=some_tokens(seed=2),
    source=some_tokens(seed=3, length=6),
    source_mask=torch.arange(6)[None] < torch.tensor([[6], [4]]),
)


def gradients(network, batch=BATCH, **changes):
    objective = build_objective(network, TrainConfig(steps=1, batch_size=2, **changes))
    losses = objective(batch)
    losses.total.backward()
    found = {name: parameter.grad for name, parameter in network.named_parameters()}
    network.zero_grad()
    return losses.total.detach(), found


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{"checkpoint_activations": True}, {"chunk_tokens": 5}], ids=str)
@pytest.mark.parametrize("kind", ["decoder", "translator"])
def test_saving_memory_changes_nothing(kind, changes, precision):
    config, batch = (decoder(), BATCH) if kind == "decoder" else (translator(share_embeddings=True), PAIRS)
    loss, grads = gradients(toy(config, torch.float32), batch, precision=precision)
    other_loss, other_grads = gradients(toy(config, torch.float32), batch, precision=precision, **changes)
    torch.testing.assert_close(other_loss, loss)
    scale = 1e-6 if precision == "float32" else 0.01  # chunks add up in another order
    torch.testing.assert_close(other_grads, grads, rtol=scale, atol=20 * scale)


def test_recomputation_keeps_fewer_activations():
    def saved_bytes(**changes):
        kept = []

        def pack(tensor):
            kept.append(tensor.numel())
            return tensor

        network = toy(decoder())
        objective = build_objective(network, TrainConfig(steps=1, batch_size=2, **changes))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            objective(BATCH)
        return sum(kept)

    assert saved_bytes(checkpoint_activations=True) < 0.5 * saved_bytes()


def test_half_precision_computes_in_bfloat16_and_learns_in_float32():
    network = toy(decoder(), torch.float32)
    seen = []
    network.decoder.layers[1].register_forward_hook(lambda block, inputs, output: seen.append(output.dtype))
    loss, grads = gradients(network)
    half_loss, half_grads = gradients(network, precision="bfloat16")
    assert seen == [torch.float32, torch.bfloat16]
    assert half_loss.dtype == torch.float32
    assert all(grad.dtype == torch.float32 for grad in half_grads.values())
    assert all(parameter.dtype == torch.float32 for parameter in network.parameters())
    assert half_loss != loss
    torch.testing.assert_close(half_loss, loss, rtol=0.02, atol=0.0)
    flat, half_flat = (torch.cat([grad.flatten() for grad in found.values()]) for found in (grads, half_grads))
    assert torch.nn.functional.cosine_similarity(flat, half_flat, dim=0) > 0.999


def test_half_precision_is_the_network_in_bfloat16():
    network = toy(translator(), torch.float32)
    half = toy(translator(), torch.float32).bfloat16()
    settings = TrainConfig(steps=1, batch_size=2)
    expected = build_objective(half, settings)(PAIRS)
    torch.testing.assert_close(InBfloat16(build_objective(network, settings))(PAIRS), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("config", "batch", "num_attentions"), [(decoder(), BATCH, 2), (translator(), PAIRS, 6)])
def test_a_processor_attends_in_float32(monkeypatch, config, batch, num_attentions):
    seen = []

    def watched(q, k, v, how):
        seen.append({q.dtype, k.dtype, v.dtype})
        return fused_attention(q, k, v, how)

    monkeypatch.setattr(objective, "fused_attention", watched)
    gradients(toy(config, torch.float32), batch, precision="bfloat16")
    assert seen == [{torch.float32}] * num_attentions


@pytest.mark.parametrize(("has_it", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_what_the_processor_multiplies_faster(tmp_path, monkeypatch, has_it, expected):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_it)
    network, console = toy(decoder(), torch.float32), quiet()
    learner = Learner(network, TrainConfig(steps=1, batch_size=2, precision="auto"), World.alone())
    seen = []
    network.decoder.layers[1].register_forward_hook(lambda block, inputs, output: seen.append(output.dtype))
    learner.objective(BATCH)
    assert seen == [getattr(torch, expected)]
    train(recipe({"train": {"steps": 1, "precision": "auto"}}), tmp_path, console)
    assert f"computes in {expected}\n" in console.file.getvalue()


def heads(length, num_heads=4):
    """Queries, keys and values that lie as a projection leaves them, in bfloat16."""
    rows = torch.randn(3, 2, length, num_heads, 8).bfloat16().unbind()
    return [part.transpose(1, 2).requires_grad_() for part in rows]


def test_causal_rows_are_attended_to_in_bfloat16(monkeypatch):
    monkeypatch.setattr(objective, "fused_attention", None)
    torch.manual_seed(0)
    inputs, above = heads(length=12), torch.randn(2, 4, 12, 8)
    output = objective.on_processor(*inputs, Scoring(mask=Mask(causal=True), scale=0.3))
    assert output.dtype == torch.bfloat16
    precise = [part.detach().double().requires_grad_() for part in inputs]
    expected = scaled_dot_product_attention(*precise, is_causal=True, scale=0.3)
    torch.testing.assert_close(output.double(), expected, rtol=0.02, atol=0.02)
    found = torch.autograd.grad(output, inputs, above.bfloat16())
    for grad, wanted in zip(found, torch.autograd.grad(expected, precise, above.double()), strict=True):
        torch.testing.assert_close(grad.double(), wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("length", "num_key_heads", "changes"),
    [
        (8, 2, {}),
        (objective.LONGEST_IN_PRODUCTS + 1, 4, {}),
        (8, 4, {"mask": Mask()}),
        (8, 4, {"bias": torch.ones(8, 8)}),
        (8, 4, {"softcap": 1.0}),
        (8, 4, {"temperature": torch.full((8, 1), 0.5)}),
    ],
)
def test_what_is_more_than_causal_is_attended_to_in_float32(length, num_key_heads, changes):
    how = Scoring(**{"mask": Mask(causal=True), "scale": 0.3} | changes)
    inputs = [heads(length)[0], *heads(length, num_key_heads)[1:]]
    expected = reference_attention(*(part.float() for part in inputs), how).bfloat16()
    torch.testing.assert_close(objective.on_processor(*inputs, how), expected, rtol=0.01, atol=1e-3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"checkpoint_activations": True, "chunk_tokens": 8}, marks=pytest.mark.slow)],
    ids=str,
)
def test_compiled_is_the_same(changes):
    loss, grads = gradients(toy(decoder(), torch.float32))
    compiled_loss, compiled_grads = gradients(toy(decoder(), torch.float32), compile=True, **changes)
    torch.testing.assert_close(compiled_loss, loss)
    torch.testing.assert_close(compiled_grads, grads, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_compiled_half_precision_is_compiled_once():
    torch.compiler.reset()
    network = toy(decoder(), torch.float32)
    objective = build_objective(network, TrainConfig(steps=1, batch_size=2, precision="bfloat16", compile=True))
    first = objective(BATCH)
    first.total.backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        again = objective(BATCH)
    assert torch.equal(first.total, again.total)


def test_packed_documents_are_as_if_alone():
    network, ids = toy(decoder()), some_tokens(1, 7)
    objective = build_objective(network, TrainConfig(steps=1, batch_size=1))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    packed = Batch(tokens=ids[:, :-1], targets=ids[:, 1:], documents=documents, positions=positions)
    apart = [Batch(tokens=ids[:, a:b], targets=ids[:, a + 1 : b + 1]) for a, b in ((0, 3), (3, 6))]
    torch.testing.assert_close(objective(packed).total, sum(objective(part).total for part in apart))


def test_recurrent_networks_are_trained_by_the_same_objective():
    config = RecurrentConfig(
        source_vocab_size=VOCAB,
        target_vocab_size=VOCAB,
        embedding_width=8,
        width=8,
        cell="gru",
        attention="dot_product",
        context=32,
    )
    network = RecurrentTranslator(config)
    loss = build_objective(network, TrainConfig(steps=1, batch_size=2))(PAIRS).total
    logits = network(PAIRS.source, PAIRS.tokens, PAIRS.source_mask)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), PAIRS.targets.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)


def test_nothing_is_asked_of_ignored_places():
    targets = BATCH.targets.clone()
    targets[:, 3:] = IGNORED
    network = toy(decoder())
    whole, _ = gradients(network)
    part, _ = gradients(network, Batch(tokens=BATCH.tokens, targets=targets))
    first, _ = gradients(network, Batch(tokens=BATCH.tokens[:, :3], targets=BATCH.targets[:, :3]))
    torch.testing.assert_close(part, first)
    assert part < whole

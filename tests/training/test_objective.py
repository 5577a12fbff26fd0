"""Test the objective: half precision, recomputation and compilation change the cost but not the result."""

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
from clearhead.training.objective import Bfloat16Module, build_objective
from tests.model.toys import VOCAB, decoder, some_tokens, toy, translator
from tests.training.recipes import quiet_console, recipe

BATCH = Batch(tokens=some_tokens(), targets=some_tokens(seed=2))
PAIRS = Batch(
    tokens=some_tokens(),
    targets=some_tokens(seed=2),
    source=some_tokens(seed=3, length=6),
    source_mask=torch.arange(6)[None] < torch.tensor([[6], [4]]),
)


def loss_and_gradients(network, batch=BATCH, **changes):
    objective = build_objective(network, TrainConfig(steps=1, batch_size=2, **changes))
    losses = objective(batch)
    losses.total.backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    network.zero_grad()
    return losses.total.detach(), gradients


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{"checkpoint_activations": True}, {"chunk_tokens": 5}], ids=str)
@pytest.mark.parametrize("kind", ["decoder", "translator"])
def test_recomputation_and_chunks_do_not_change_loss_and_gradients(kind, changes, precision):
    config, batch = (decoder(), BATCH) if kind == "decoder" else (translator(share_embeddings=True), PAIRS)
    loss, grads = loss_and_gradients(toy(config, torch.float32), batch, precision=precision)
    other_loss, other_grads = loss_and_gradients(toy(config, torch.float32), batch, precision=precision, **changes)
    torch.testing.assert_close(other_loss, loss)
    scale = 1e-6 if precision == "float32" else 0.01  # chunks are summed in another order
    torch.testing.assert_close(other_grads, grads, rtol=scale, atol=20 * scale)


def test_recomputation_stores_fewer_activations():
    def num_saved_elements(**changes):
        sizes = []

        def pack(tensor):
            sizes.append(tensor.numel())
            return tensor

        network = toy(decoder())
        objective = build_objective(network, TrainConfig(steps=1, batch_size=2, **changes))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            objective(BATCH)
        return sum(sizes)

    assert num_saved_elements(checkpoint_activations=True) < 0.5 * num_saved_elements()


def test_half_precision_computes_in_bfloat16_with_float32_weights_and_gradients():
    network = toy(decoder(), torch.float32)
    seen = []
    network.decoder.layers[1].register_forward_hook(lambda block, inputs, output: seen.append(output.dtype))
    loss, grads = loss_and_gradients(network)
    half_loss, half_grads = loss_and_gradients(network, precision="bfloat16")
    assert seen == [torch.float32, torch.bfloat16]
    assert half_loss.dtype == torch.float32
    assert all(grad.dtype == torch.float32 for grad in half_grads.values())
    assert all(parameter.dtype == torch.float32 for parameter in network.parameters())
    assert half_loss != loss
    torch.testing.assert_close(half_loss, loss, rtol=0.02, atol=0.0)
    flat, half_flat = (torch.cat([grad.flatten() for grad in group.values()]) for group in (grads, half_grads))
    assert torch.nn.functional.cosine_similarity(flat, half_flat, dim=0) > 0.999


def test_half_precision_equals_the_network_cast_to_bfloat16():
    network = toy(translator(), torch.float32)
    half = toy(translator(), torch.float32).bfloat16()
    settings = TrainConfig(steps=1, batch_size=2)
    expected = build_objective(half, settings)(PAIRS)
    torch.testing.assert_close(Bfloat16Module(build_objective(network, settings))(PAIRS), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("config", "batch", "num_attentions"), [(decoder(), BATCH, 2), (translator(), PAIRS, 6)])
def test_attention_on_a_cpu_runs_in_float32(monkeypatch, config, batch, num_attentions):
    seen = []

    def recording_attention(q, k, v, scoring):
        seen.append({q.dtype, k.dtype, v.dtype})
        return fused_attention(q, k, v, scoring)

    monkeypatch.setattr(objective, "fused_attention", recording_attention)
    loss_and_gradients(toy(config, torch.float32), batch, precision="bfloat16")
    assert seen == [{torch.float32}] * num_attentions


@pytest.mark.parametrize(("has_bfloat16", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_auto_precision_is_the_faster_one_of_the_cpu(tmp_path, monkeypatch, has_bfloat16, expected):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bfloat16)
    network, console = toy(decoder(), torch.float32), quiet_console()
    learner = Learner(network, TrainConfig(steps=1, batch_size=2, precision="auto"), World.single_process())
    seen = []
    network.decoder.layers[1].register_forward_hook(lambda block, inputs, output: seen.append(output.dtype))
    learner.objective(BATCH)
    assert seen == [getattr(torch, expected)]
    train(recipe({"train": {"steps": 1, "precision": "auto"}}), tmp_path, console)
    assert f"; {expected} on cpu\n" in console.file.getvalue()


def random_heads(length, num_heads=4):
    """Return queries, keys and values in bfloat16, with the memory layout of a projection's output."""
    rows = torch.randn(3, 2, length, num_heads, 8).bfloat16().unbind()
    return [part.transpose(1, 2).requires_grad_() for part in rows]


def test_causal_attention_on_a_cpu_runs_in_bfloat16(monkeypatch):
    monkeypatch.setattr(objective, "fused_attention", None)
    torch.manual_seed(0)
    inputs, output_gradient = random_heads(length=12), torch.randn(2, 4, 12, 8)
    output = objective.cpu_training_attention(*inputs, Scoring(mask=Mask(causal=True), scale=0.3))
    assert output.dtype == torch.bfloat16
    precise = [part.detach().double().requires_grad_() for part in inputs]
    expected = scaled_dot_product_attention(*precise, is_causal=True, scale=0.3)
    torch.testing.assert_close(output.double(), expected, rtol=0.02, atol=0.02)
    gradients = torch.autograd.grad(output, inputs, output_gradient.bfloat16())
    references = torch.autograd.grad(expected, precise, output_gradient.double())
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("length", "num_key_heads", "changes"),
    [
        (8, 2, {}),
        (objective.MAX_MATMUL_LENGTH + 1, 4, {}),
        (8, 4, {"mask": Mask()}),
        (8, 4, {"bias": torch.ones(8, 8)}),
        (8, 4, {"softcap": 1.0}),
        (8, 4, {"temperature": torch.full((8, 1), 0.5)}),
    ],
)
def test_other_attention_on_a_cpu_runs_in_float32(length, num_key_heads, changes):
    scoring = Scoring(**{"mask": Mask(causal=True), "scale": 0.3} | changes)
    inputs = [random_heads(length)[0], *random_heads(length, num_key_heads)[1:]]
    expected = reference_attention(*(part.float() for part in inputs), scoring).bfloat16()
    torch.testing.assert_close(objective.cpu_training_attention(*inputs, scoring), expected, rtol=0.01, atol=1e-3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"checkpoint_activations": True, "chunk_tokens": 8}, marks=pytest.mark.slow)],
    ids=str,
)
def test_compilation_does_not_change_loss_and_gradients(changes):
    loss, grads = loss_and_gradients(toy(decoder(), torch.float32))
    compiled_loss, compiled_grads = loss_and_gradients(toy(decoder(), torch.float32), compile=True, **changes)
    torch.testing.assert_close(compiled_loss, loss)
    torch.testing.assert_close(compiled_grads, grads, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_half_precision_compiles_only_once():
    torch.compiler.reset()
    network = toy(decoder(), torch.float32)
    objective = build_objective(network, TrainConfig(steps=1, batch_size=2, precision="bfloat16", compile=True))
    first = objective(BATCH)
    first.total.backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        again = objective(BATCH)
    assert torch.equal(first.total, again.total)


def test_packed_documents_have_the_same_loss_as_separate_ones():
    network, ids = toy(decoder()), some_tokens(1, 7)
    objective = build_objective(network, TrainConfig(steps=1, batch_size=1))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    packed = Batch(tokens=ids[:, :-1], targets=ids[:, 1:], documents=documents, positions=positions)
    separate = [Batch(tokens=ids[:, a:b], targets=ids[:, a + 1 : b + 1]) for a, b in ((0, 3), (3, 6))]
    torch.testing.assert_close(objective(packed).total, sum(objective(part).total for part in separate))


def test_the_objective_of_a_recurrent_network_is_its_cross_entropy():
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


def test_ignored_positions_have_no_loss():
    targets = BATCH.targets.clone()
    targets[:, 3:] = IGNORED
    network = toy(decoder())
    full, _ = loss_and_gradients(network)
    partial, _ = loss_and_gradients(network, Batch(tokens=BATCH.tokens, targets=targets))
    first, _ = loss_and_gradients(network, Batch(tokens=BATCH.tokens[:, :3], targets=BATCH.targets[:, :3]))
    torch.testing.assert_close(partial, first)
    assert partial < full

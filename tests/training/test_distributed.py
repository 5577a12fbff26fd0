"""One process, two or four: the same losses, the same weights, and checkpoints that all of them can read."""

from dataclasses import replace

import pytest
import safetensors.torch
import torch

from clearhead.architecture.branches import Experts, FeedForward, Router
from clearhead.architecture.config import Dropout, HeadNorm
from clearhead.architecture.parts import Alibi, Rope
from clearhead.errors import ClearheadError
from clearhead.model.recurrent import RecurrentConfig, RecurrentTranslator
from clearhead.training.checkpoints.run_folder import RunFolder
from clearhead.training.checkpoints.state import flatten_optimizer, restore_optimizer, restore_weights
from clearhead.training.distributed import World
from clearhead.training.tensor_parallel import Part, divide
from tests.model.toys import NORM, decoder, grouped, latent, stack, toy, translator
from tests.training.crew import Run, run_crew
from tests.training.faults import Faulty

GATED = FeedForward(width=24, activation="silu", gated=True)
PLAIN = decoder(Rope(), output_bias=True)
NORMED = replace(PLAIN, decoder=stack(grouped(position=Rope(), head_norm=HeadNorm(norm=NORM)), feed_forward=GATED))
MIXTURE = Experts(num_experts=4, num_chosen=2, expert=GATED, router=Router(score="softmax"))


def train(world, config, path, num_steps, num_parts=1, **options):
    run = Run(world, config, **options)
    for number in range(num_steps):
        run.step(number, num_parts)
    curves = {"losses": torch.tensor(run.losses, dtype=torch.float64), "norms": torch.tensor(run.norms)}
    weights = world.gather_weights(run.weights)
    if world.is_main:
        safetensors.torch.save_file(weights | curves, path)


def assert_same(found, expected, tolerance, only=None):
    found, expected = safetensors.torch.load_file(found), safetensors.torch.load_file(expected)
    assert found.keys() == expected.keys()
    for name in [only] if only else expected:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(("kind", "size"), [("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4), ("tp", 2)])
def test_one_process_or_several_train_alike(tmp_path, kind, size):
    """Eight rows of unequal lengths in one process, two of four, four of two: fifty steps in float32."""

    def both(world, folder):
        folder.mkdir(exist_ok=True)
        train(world, PLAIN, folder / "float64", 10)
        train(world, PLAIN, folder / "float32", 50, dtype=torch.float32)

    both(World.alone(), tmp_path / "1")
    run_crew(size, kind, lambda world: both(world, tmp_path / "x"))
    assert_same(tmp_path / "x" / "float64", tmp_path / "1" / "float64", 1e-12)
    # Where a gradient is nearly 0, AdamW makes much of its last digits; the losses do not see it.
    assert_same(tmp_path / "x" / "float32", tmp_path / "1" / "float32", 1e-6, only="losses")


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_other_networks_and_parts_train_alike(tmp_path, kind):
    """Head norms and gates; an encoder and a decoder, in two parts for each update."""

    def both(world, folder):
        folder.mkdir(exist_ok=True)
        train(world, NORMED, folder / "normed", 8)
        train(world, translator(), folder / "parts", 8, num_parts=2)

    both(World.alone(), tmp_path / "1")
    run_crew(2, kind, lambda world: both(world, tmp_path / "2"))
    for name in ("normed", "parts"):
        assert_same(tmp_path / "2" / name, tmp_path / "1" / name, 1e-9)


def test_what_tensor_parallel_leaves_whole_stays_the_same_everywhere():
    """Also with dropout, as long as all draw alike."""
    config = replace(PLAIN, dropout=Dropout(embedding=0.2, attention=0.2, residual=0.2, activation=0.2))

    def drop(world):
        torch.manual_seed(world.data_rank)
        run = Run(world, config)
        assert run.network.training
        for number in range(3):
            run.step(number)
        whole = {name: weight.tolist() for name, weight in run.weights.items() if not world.is_slice(weight)}
        assert {"decoder.embedding.tokens.weight", "decoder.layers.0.attention.output.bias"} <= whole.keys()
        first, second = world.together(lambda: whole)
        assert first == second

    run_crew(2, "tp", drop)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Muon])
def test_sliced_weights_move_by_either_optimizer(tmp_path, optimizer):
    """The fused kernel on slices; and Muon, which needs each matrix whole and computes with it in bfloat16."""

    def move_matrices(world, path):
        run = Run(world, PLAIN)
        blocks = {name: weight for name, weight in run.weights.items() if ".layers." in name and weight.ndim == 2}
        options = {"fused": True} if optimizer is torch.optim.AdamW else {"adjust_lr_fn": "match_rms_adamw"}
        run.optimizer = optimizer(blocks.values(), lr=1e-2, **options)
        before = {name: weight.clone() for name, weight in world.gather_weights(blocks).items()}
        for number in range(4):
            run.step(number)
        after = world.gather_weights(blocks)
        if world.is_main:
            safetensors.torch.save_file({name: after[name] - before[name] for name in after}, path)

    move_matrices(World.alone(), tmp_path / "1")
    run_crew(2, "fsdp", lambda world: move_matrices(world, tmp_path / "2"))
    found, expected = (safetensors.torch.load_file(tmp_path / name) for name in "21")
    for name, moved in expected.items():
        assert (found[name] - moved).norm() < (1e-6 if optimizer is torch.optim.AdamW else 0.05) * moved.norm()


def test_half_precision_of_slices(tmp_path):
    """Gathered and computed in bfloat16, but for routers; held, summed and moved in float32."""
    config = replace(PLAIN, decoder=stack(grouped(position=Rope()), feed_forward=MIXTURE))

    def loss_of(world, path, dtype):
        run = Run(world, config, dtype=torch.float32, wrapped_dtype=dtype)
        seen = []
        run.network.decoder.layers[0].feed_forward.router.register_forward_pre_hook(
            lambda router, inputs: seen.append((router.weight.dtype, inputs[0].dtype))
        )
        run.step(0)
        assert all(weight.dtype == torch.float32 for weight in run.weights.values())
        if world.is_main:
            safetensors.torch.save_file({"loss": torch.tensor(run.losses), "norm": torch.tensor(run.norms)}, path)
            assert seen == [(torch.float32, dtype or torch.float32)]

    loss_of(World.alone(), tmp_path / "1", None)
    run_crew(2, "fsdp", lambda world: loss_of(world, tmp_path / "2", torch.bfloat16))
    assert_same(tmp_path / "2", tmp_path / "1", 0.05)
    assert not torch.equal(*(safetensors.torch.load_file(tmp_path / name)["loss"] for name in "12"))


def part_of_a_run(world, folder, path, until):
    """Go on from the newest checkpoint up to this step, save, and write the weights down whole."""
    run, folder = Run(world, PLAIN), RunFolder(folder, world=world)
    with folder.lock():
        saved = folder.latest()
        if saved is not None:
            restore_weights(run.weights, saved.tensors("weights", run.weights))
            restore_optimizer(run.optimizer, run.weights, saved.tensors("optimizer", run.weights))
        for number in range(saved.step if saved else 0, until):
            run.step(number)
        tensors = {"weights": run.weights, "optimizer": flatten_optimizer(run.optimizer, run.weights)}
        tensors["randomness"] = {"torch": torch.full((2,), float(world.rank))}
        folder.save(until, tensors, {"size": world.size})
        weights = world.gather_weights(run.weights)
        if world.is_main:
            safetensors.torch.save_file(weights, path)


def test_checkpoints_are_read_by_another_number_of_processes(tmp_path):
    part_of_a_run(World.alone(), tmp_path / "straight", tmp_path / "expected", 10)
    run, found = tmp_path / "run", tmp_path / "found"
    run_crew(2, "fsdp", lambda world: part_of_a_run(world, run, found, 2))
    names = {path.name for path in (run / "checkpoints" / "step-00000002").iterdir()}
    assert {"weights-00001-of-00002.safetensors", "weights-00002-of-00002.safetensors"} <= names
    run_crew(3, "fsdp", lambda world: part_of_a_run(world, run, found, 4))
    run_crew(2, "tp", lambda world: part_of_a_run(world, run, found, 6))
    run_crew(2, "ddp", lambda world: part_of_a_run(world, run, found, 8))
    part_of_a_run(World.alone(), run, found, 10)
    assert_same(found, tmp_path / "expected", 1e-12)
    assert RunFolder(run).latest().tensors("randomness")["torch"].tolist() == [0.0, 0.0]


def test_randomness_belongs_to_the_rows_read(tmp_path):
    """Processes that read the same rows must draw alike, others must not; another division has to begin anew."""

    def save_and_read(world, folder):
        run = RunFolder(folder, world=world)
        run.save(1, {"randomness": {"torch": torch.full((2,), float(world.data_rank))}}, {})
        assert run.latest().tensors("randomness")["torch"].tolist() == [world.data_rank] * 2

    told = []
    run_crew(2, "ddp", lambda world: save_and_read(world, tmp_path / "ddp"))
    assert RunFolder(tmp_path / "ddp", warn=told.append).latest().tensors("randomness") == {}
    assert "written by 2 processes" in told.pop()
    run_crew(2, "tp", lambda world: save_and_read(world, tmp_path / "tp"))
    assert RunFolder(tmp_path / "tp", warn=told.append).latest().tensors("randomness")["torch"].tolist() == [0, 0]
    assert not told


def test_a_failure_in_one_process_is_told_by_all(tmp_path):
    """A disk that is full for the second process only: no one waits for it, and nothing half-written stays."""

    def save(world):
        run = Run(world, PLAIN)
        folder = RunFolder(tmp_path, world=world, files=Faulty(at=2 if world.rank == 1 else None))
        with pytest.raises(ClearheadError, match=r"00002-of-00002.* No space left"):
            folder.save(1, {"weights": run.weights}, {})
        assert folder.latest() is None
        assert not list(tmp_path.rglob("*.partial"))
        assert world.any(world.rank == 1)
        assert not world.any(False)

    run_crew(2, "fsdp", save)


def test_gradients_are_clipped_as_torch_clips_them():
    network, twin = toy(PLAIN), toy(PLAIN)
    for one in (network, twin):
        one(torch.arange(8)[None]).square().sum().backward()
    norm = World.alone().clip_gradients(network.parameters(), 0.5)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5))
    for one, other in zip(network.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_gradients_of_any_length_are_left_as_they_are():
    network = toy(PLAIN)
    network(torch.arange(8)[None]).square().sum().backward()
    before = [weight.grad.clone() for weight in network.parameters()]
    assert World.alone().clip_gradients(network.parameters(), 0) > 0
    assert all(torch.equal(weight.grad, old) for weight, old in zip(network.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("config", "count", "sentence"),
    [
        (decoder(Alibi()), 2, "cannot divide heads with Alibi"),
        (decoder(), 4, "2 key-value heads do not divide among 4"),
        (replace(PLAIN, decoder=stack(latent())), 2, "cannot divide latent attention"),
        (replace(PLAIN, decoder=stack(grouped(), feed_forward=MIXTURE)), 2, "cannot divide a mixture of experts"),
        (
            replace(PLAIN, decoder=stack(grouped(), feed_forward=replace(GATED, width=25))),
            2,
            "width 25 does not divide",
        ),
    ],
)
def test_what_tensor_parallel_cannot_divide_is_said(config, count, sentence):
    with pytest.raises(ClearheadError, match=sentence):
        divide(toy(config), Part(0, count, lambda tensor: tensor))


def test_a_recurrent_network_is_not_divided():
    sizes = {"source_vocab_size": 9, "target_vocab_size": 9, "embedding_width": 4, "width": 4, "context": 9}
    network = RecurrentTranslator(RecurrentConfig(cell="gru", attention="none", **sizes))
    with pytest.raises(ClearheadError, match="cannot divide a recurrent network; use the strategy 'ddp'"):
        divide(network, Part(0, 2, lambda tensor: tensor))


def test_one_process_where_torchrun_started_several_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ClearheadError, match="torchrun started 2 processes"):
        World.start("single")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_said():
    with pytest.raises(ClearheadError, match="there is no device 'cuda:0' here"):
        World.start(device="cuda")

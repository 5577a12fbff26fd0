"""Test that one, two and four processes compute the same losses and weights and read each other's checkpoints."""

from dataclasses import replace

import pytest
import safetensors.torch
import torch

from clearhead.architecture import Alibi, Dropout, Experts, FeedForward, HeadNorm, Rope, Router
from clearhead.errors import ClearheadError
from clearhead.model.recurrent import RecurrentConfig, RecurrentTranslator
from clearhead.parallel import TensorParallelRank, shard_network
from clearhead.training.checkpoints import RunFolder, flatten_optimizer, restore_optimizer, restore_weights
from clearhead.training.distributed import World
from tests.model.toys import NORM, decoder, grouped, latent, stack, toy, translator
from tests.training.faulty_disk import FaultyFileSystem
from tests.training.processes import SmallRun, run_distributed

GATED = FeedForward(width=24, activation="silu", gated=True)
PLAIN = decoder(Rope(), output_bias=True)
NORMED = replace(PLAIN, decoder=stack(grouped(position=Rope(), head_norm=HeadNorm(norm=NORM)), feed_forward=GATED))
MIXTURE = Experts(num_experts=4, num_chosen=2, expert=GATED, router=Router(score="softmax"))


def train_and_save(world, config, path, num_steps, num_parts=1, **options):
    run = SmallRun(world, config, **options)
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
def test_several_processes_compute_the_same_as_one(tmp_path, kind, size):
    """Eight rows of unequal lengths are read by one process, four by each of two, or two by each of four."""

    def train_both(world, folder):
        folder.mkdir(exist_ok=True)
        train_and_save(world, PLAIN, folder / "float64", 10)
        train_and_save(world, PLAIN, folder / "float32", 50, dtype=torch.float32)

    train_both(World.single_process(), tmp_path / "1")
    run_distributed(size, kind, lambda world: train_both(world, tmp_path / "x"))
    assert_same(tmp_path / "x" / "float64", tmp_path / "1" / "float64", 1e-12)
    # AdamW amplifies the rounding of gradients near 0, so only the losses of 50 steps in float32 are compared.
    assert_same(tmp_path / "x" / "float32", tmp_path / "1" / "float32", 1e-6, only="losses")


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_several_processes_agree_for_other_networks_and_with_accumulation(tmp_path, kind):
    """Train a decoder with head norms and gates, and an encoder-decoder in two parts per step."""

    def train_both(world, folder):
        folder.mkdir(exist_ok=True)
        train_and_save(world, NORMED, folder / "normed", 8)
        train_and_save(world, translator(), folder / "parts", 8, num_parts=2)

    train_both(World.single_process(), tmp_path / "1")
    run_distributed(2, kind, lambda world: train_both(world, tmp_path / "2"))
    for name in ("normed", "parts"):
        assert_same(tmp_path / "2" / name, tmp_path / "1" / name, 1e-9)


def test_weights_that_tensor_parallelism_replicates_stay_equal_in_all_processes():
    """This includes dropout, if all processes have the same random state."""
    config = replace(PLAIN, dropout=Dropout(embedding=0.2, attention=0.2, residual=0.2, activation=0.2))

    def train_with_dropout(world):
        torch.manual_seed(world.data_rank)
        run = SmallRun(world, config)
        assert run.network.training
        for number in range(3):
            run.step(number)
        replicated = {name: weight.tolist() for name, weight in run.weights.items() if not world.is_sharded(weight)}
        assert {"decoder.embedding.tokens.weight", "decoder.layers.0.attention.output.bias"} <= replicated.keys()
        first, second = world.run_everywhere(lambda: replicated)
        assert first == second

    run_distributed(2, "tp", train_with_dropout)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Muon])
def test_both_optimizers_update_sharded_weights_like_full_ones(tmp_path, optimizer):
    """AdamW runs its fused kernel on shards. Muon gathers each matrix and computes in bfloat16."""

    def train_matrices(world, path):
        run = SmallRun(world, PLAIN)
        matrices = {name: weight for name, weight in run.weights.items() if ".layers." in name and weight.ndim == 2}
        options = {"fused": True} if optimizer is torch.optim.AdamW else {"adjust_lr_fn": "match_rms_adamw"}
        run.optimizer = optimizer(matrices.values(), lr=1e-2, **options)
        before = {name: weight.clone() for name, weight in world.gather_weights(matrices).items()}
        for number in range(4):
            run.step(number)
        after = world.gather_weights(matrices)
        if world.is_main:
            safetensors.torch.save_file({name: after[name] - before[name] for name in after}, path)

    train_matrices(World.single_process(), tmp_path / "1")
    run_distributed(2, "fsdp", lambda world: train_matrices(world, tmp_path / "2"))
    found, expected = (safetensors.torch.load_file(tmp_path / name) for name in "21")
    for name, change in expected.items():
        assert (found[name] - change).norm() < (1e-6 if optimizer is torch.optim.AdamW else 0.05) * change.norm()


def test_fsdp_in_half_precision_keeps_weights_and_routers_in_float32(tmp_path):
    """Weights are gathered and computed in bfloat16, except routers; they are stored, summed and updated in float32."""
    config = replace(PLAIN, decoder=stack(grouped(position=Rope()), feed_forward=MIXTURE))

    def save_loss(world, path, dtype):
        run = SmallRun(world, config, dtype=torch.float32, wrapped_dtype=dtype)
        seen = []
        run.network.decoder.layers[0].feed_forward.router.register_forward_pre_hook(
            lambda router, inputs: seen.append((router.weight.dtype, inputs[0].dtype))
        )
        run.step(0)
        assert all(weight.dtype == torch.float32 for weight in run.weights.values())
        if world.is_main:
            safetensors.torch.save_file({"loss": torch.tensor(run.losses), "norm": torch.tensor(run.norms)}, path)
            assert seen == [(torch.float32, dtype or torch.float32)]

    save_loss(World.single_process(), tmp_path / "1", None)
    run_distributed(2, "fsdp", lambda world: save_loss(world, tmp_path / "2", torch.bfloat16))
    assert_same(tmp_path / "2", tmp_path / "1", 0.05)
    assert not torch.equal(*(safetensors.torch.load_file(tmp_path / name)["loss"] for name in "12"))


def continue_run(world, folder, path, until):
    """Resume from the newest checkpoint, train up to a step, save, and write the full weights to `path`."""
    run, folder = SmallRun(world, PLAIN), RunFolder(folder, world=world)
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


def test_checkpoints_are_read_by_other_numbers_of_processes_and_strategies(tmp_path):
    continue_run(World.single_process(), tmp_path / "straight", tmp_path / "expected", 10)
    run, found = tmp_path / "run", tmp_path / "found"
    run_distributed(2, "fsdp", lambda world: continue_run(world, run, found, 2))
    names = {path.name for path in (run / "checkpoints" / "step-00000002").iterdir()}
    assert {"weights-00001-of-00002.safetensors", "weights-00002-of-00002.safetensors"} <= names
    run_distributed(3, "fsdp", lambda world: continue_run(world, run, found, 4))
    run_distributed(2, "tp", lambda world: continue_run(world, run, found, 6))
    run_distributed(2, "ddp", lambda world: continue_run(world, run, found, 8))
    continue_run(World.single_process(), run, found, 10)
    assert_same(found, tmp_path / "expected", 1e-12)
    assert RunFolder(run).latest().tensors("randomness")["torch"].tolist() == [0.0, 0.0]


def test_the_random_state_is_saved_for_each_data_rank(tmp_path):
    """Processes that read the same rows share a random state; it is dropped if the number of data ranks changes."""

    def save_and_read(world, folder):
        run = RunFolder(folder, world=world)
        run.save(1, {"randomness": {"torch": torch.full((2,), float(world.data_rank))}}, {})
        assert run.latest().tensors("randomness")["torch"].tolist() == [world.data_rank] * 2

    warnings = []
    run_distributed(2, "ddp", lambda world: save_and_read(world, tmp_path / "ddp"))
    assert RunFolder(tmp_path / "ddp", warn=warnings.append).latest().tensors("randomness") == {}
    assert "written by 2 data-parallel processes" in warnings.pop()
    run_distributed(2, "tp", lambda world: save_and_read(world, tmp_path / "tp"))
    assert RunFolder(tmp_path / "tp", warn=warnings.append).latest().tensors("randomness")["torch"].tolist() == [0, 0]
    assert not warnings


def test_a_failed_save_in_one_process_raises_in_all_of_them(tmp_path):
    """The disk is full for the second process only. No process waits for it, and no partial file remains."""

    def save(world):
        run = SmallRun(world, PLAIN)
        folder = RunFolder(tmp_path, world=world, file_system=FaultyFileSystem(fail_at=2 if world.rank == 1 else None))
        with pytest.raises(ClearheadError, match=r"00002-of-00002.* No space left"):
            folder.save(1, {"weights": run.weights}, {})
        assert folder.latest() is None
        assert not list(tmp_path.rglob("*.partial"))
        assert world.any(world.rank == 1)
        assert not world.any(False)

    run_distributed(2, "fsdp", save)


def test_clip_gradients_equals_clip_grad_norm_of_torch():
    network, reference = toy(PLAIN), toy(PLAIN)
    for each in (network, reference):
        each(torch.arange(8)[None]).square().sum().backward()
    norm = World.single_process().clip_gradients(network.parameters(), 0.5)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
    for weight, expected in zip(network.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, expected.grad)


def test_clip_gradients_with_zero_does_not_change_them():
    network = toy(PLAIN)
    network(torch.arange(8)[None]).square().sum().backward()
    before = [weight.grad.clone() for weight in network.parameters()]
    assert World.single_process().clip_gradients(network.parameters(), 0) > 0
    assert all(torch.equal(weight.grad, old) for weight, old in zip(network.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("config", "count", "message"),
    [
        (decoder(Alibi()), 2, "does not support heads with Alibi"),
        (decoder(), 4, "2 key-value heads cannot be divided among 4 processes"),
        (replace(PLAIN, decoder=stack(latent())), 2, "does not support latent attention"),
        (replace(PLAIN, decoder=stack(grouped(), feed_forward=MIXTURE)), 2, "does not support a mixture of experts"),
        (
            replace(PLAIN, decoder=stack(grouped(), feed_forward=replace(GATED, width=25))),
            2,
            "width 25 cannot be divided among 2 processes",
        ),
    ],
)
def test_tensor_parallelism_rejects_unsupported_networks(config, count, message):
    with pytest.raises(ClearheadError, match=message):
        shard_network(toy(config), TensorParallelRank(0, count, lambda tensor: tensor, "use strategy 'fsdp'"))


def test_tensor_parallelism_rejects_recurrent_networks():
    sizes = {"source_vocab_size": 9, "target_vocab_size": 9, "embedding_width": 4, "width": 4, "context": 9}
    network = RecurrentTranslator(RecurrentConfig(cell="gru", attention="none", **sizes))
    with pytest.raises(ClearheadError, match="does not support recurrent networks; use strategy 'ddp'"):
        shard_network(network, TensorParallelRank(0, 2, lambda tensor: tensor, "use strategy 'fsdp'"))


def test_the_single_strategy_is_rejected_under_torchrun_with_several_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ClearheadError, match="torchrun started 2 processes"):
        World.start("single")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_rejected():
    with pytest.raises(ClearheadError, match="the device 'cuda:0' is not available"):
        World.start(device="cuda")

"""Ours against transformers at toy size: same folder on disk, same inputs, every logit compared.

Plain initialisation hides a tenth of all errors (a GELU variant, a scale, a bias that is zero), so every parameter
is drawn anew with an effect of order one, and norms get a large epsilon in the cases' configs.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from clearhead.architecture import ModelConfig
from clearhead.checkpoint.huggingface import load_folder, save_folder
from clearhead.families import family_for
from clearhead.families.settings import Settings
from clearhead.model.attend import fused_attention, reference_attention
from clearhead.model.transformer import Transformer
from tests.parity.mutants import mutants

VOCAB, BATCH, LENGTH = 97, 2, 24


@dataclass(frozen=True)
class Case:
    """One reference model at toy size. `build` makes the transformers model; the rest says how to compare."""

    name: str
    build: Callable[[], nn.Module]
    length: int = LENGTH
    tolerance: float = 1e-5
    tolerance_float64: float = 1e-12
    special: Callable[[str, Tensor], Tensor | None] = lambda name, parameter: None  # own draw for a parameter
    positions_as_argument: bool = True  # the reference takes position_ids
    output: str = "logits"  # what to compare, by its name in the reference's output
    blind: tuple[str, ...] = ()  # fields whose small errors this case cannot see, by a part of their path
    exact_tensors: bool = True  # what we save is bit-equal to what transformers saved
    recomputed: str = "$."  # pattern of tensors that transformers saves though they follow from the config

    def __str__(self) -> str:
        return self.name


def build(case: Case, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The reference with every parameter and every saved buffer drawn anew."""
    torch.manual_seed(0)
    model = case.build().eval()
    rerandomize(model, case.special)
    return model.to(dtype)


@torch.no_grad()
def rerandomize(model: nn.Module, special: Callable[[str, Tensor], Tensor | None]) -> None:
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    saved = set(model.state_dict())
    tensors = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n in saved}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        draw = special(name, tensor)
        if draw is None and id(tensor) in tables:
            draw = 0.3 * torch.randn_like(tensor)
        elif draw is None and tensor.ndim >= 2:
            draw = torch.randn_like(tensor) * fan_in(name, tensor, model) ** -0.5
        elif draw is None:
            is_weight = "norm" in name.lower() or "ln_" in name or name.endswith(("layer_norm.weight", "ln.weight"))
            draw = float(is_weight and name.endswith("weight")) + 0.3 * torch.randn_like(tensor)
        tensor.copy_(draw)


def fan_in(name: str, tensor: Tensor, model: nn.Module) -> int:
    owner = model.get_submodule(name.rpartition(".")[0])
    stored_in_out = type(owner).__name__ in ("Conv1D", "Llama4TextExperts")
    return tensor.shape[-2] if stored_in_out else tensor.shape[-1]


def load_ours(model: nn.Module, folder: Path) -> Transformer:
    """Through the disk, as a user would: transformers saves, we load."""
    model.save_pretrained(folder)
    return load_folder(folder).network


def inputs(case: Case, config: ModelConfig, padded: bool) -> dict[str, Tensor]:
    """For one stack: tokens, attention_mask, position_ids; for two: tokens (the source), target and their masks."""
    generator = torch.Generator().manual_seed(1)

    def tokens(length: int) -> Tensor:
        return torch.randint(0, config.vocab_size, (BATCH, length), generator=generator)

    def mask(length: int, left: bool) -> Tensor:
        ones = torch.ones(BATCH, length, dtype=torch.long)
        if padded:
            ones[1, : length // 4] = 0
        return ones if left else ones.flip(1)

    if config.is_encoder_decoder:
        source, target = tokens(case.length), tokens(case.length - 5)
        return {
            "source": source,
            "target": target,
            "source_mask": mask(case.length, left=False),
            "target_mask": torch.ones_like(target),
        }
    # Beside the encoders, padding stands on the left, where it moves every position.
    left = config.decoder is not None
    attention_mask = mask(case.length, left)
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return {"tokens": tokens(case.length), "attention_mask": attention_mask, "position_ids": positions}


def run_reference(model: nn.Module, case: Case, given: dict[str, Tensor]) -> Tensor:
    if "target" in given:
        named = {
            "input_ids": given["source"],
            "attention_mask": given["source_mask"],
            "decoder_input_ids": given["target"],
            "decoder_attention_mask": given["target_mask"],
        }
    else:
        named = {"input_ids": given["tokens"], "attention_mask": given["attention_mask"]}
        if case.positions_as_argument:
            named["position_ids"] = given["position_ids"]
    with torch.no_grad():
        found = model(**named, **({"use_cache": False} if hasattr(model.config, "use_cache") else {}))
    return getattr(found, case.output)


def difference(ours: Tensor, theirs: Tensor, given: dict[str, Tensor]) -> float:
    """Largest at real positions; rows of padding are each implementation's own business."""
    real = given.get("attention_mask", given.get("target_mask"))
    assert real is not None
    assert ours.shape == theirs.shape
    return (ours - theirs)[real.bool()].abs().max().item()


@contextlib.contextmanager
def float32_means_float64() -> Iterator[None]:
    """transformers casts to float32 in places; in a float64 comparison these casts are promoted too."""
    kept = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = kept
        torch.set_default_dtype(torch.float32)


# --- the checks that every family passes


def check_logits(case: Case, folder: Path, **options: bool) -> None:
    """`options` go to our network."""
    model = build(case)
    network = load_ours(model, folder)
    for padded in (False, True):
        given = inputs(case, network.config, padded)
        theirs = run_reference(model, case, given)
        assert theirs.abs().max() > 0.1, "a reference without effect compares nothing"
        for kernel in (fused_attention, reference_attention):
            with torch.no_grad():
                found = difference(network(**given, kernel=kernel, **options), theirs, given)
            assert found <= case.tolerance, f"padded={padded} {kernel.__name__}: {found:.2e}"


def check_float64(case: Case, folder: Path, **options: bool) -> None:
    with float32_means_float64():  # tables made at birth, such as rotary frequencies, are meant too
        model = build(case, torch.float64)
    model.config._experts_implementation = "eager"
    network = load_ours(model, folder)
    given = inputs(case, network.config, padded=True)
    with float32_means_float64():
        theirs = run_reference(model, case, given)
    with torch.no_grad():
        ours = network(**given, **options)
    assert ours.dtype == torch.float64
    found = difference(ours, theirs, given)
    assert found <= case.tolerance_float64, f"{found:.2e}"


def check_round_trip(case: Case, folder: Path) -> None:
    """transformers -> ours -> transformers: tensors bit-equal, config understood, logits the same."""
    model = build(case)
    model.save_pretrained(folder / "theirs")
    loaded = load_folder(folder / "theirs")
    config = loaded.network.config
    saved_as = save_folder(loaded.network, folder / "ours", loaded.family, loaded.special_ids)
    for family in (saved_as, family_for(config)):
        assert family.read_config is not None
        assert family.write_config is not None
        assert family.read_config(Settings(family.write_config(config), "written")) == config
    if case.exact_tensors:
        theirs, ours = (
            load_file(folder / "theirs" / "model.safetensors"),
            load_file(folder / "ours" / "model.safetensors"),
        )
        assert ours.keys() == {name for name in theirs if not re.fullmatch(case.recomputed, name)}
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    again = type(model).from_pretrained(folder / "ours", attn_implementation="eager").eval()
    given = inputs(case, config, padded=False)
    assert torch.equal(run_reference(again, case, given), run_reference(model, case, given))


def check_mutants(case: Case, folder: Path) -> int:
    """Every one-field error in our config is seen: the checkpoint no longer fits, or a logit moves."""
    model = build(case)
    network = load_ours(model, folder)
    given = inputs(case, network.config, padded=True)
    theirs = run_reference(model, case, given)
    weights = network.state_dict()
    caught, missed = 0, []
    for path, config in mutants(network.config):
        if seen(config, weights, given, theirs, case.tolerance):
            caught += 1
        elif not any(part in path for part in case.blind):
            missed.append(path)
    assert not missed, f"errors that no comparison sees: {missed}"
    return caught


# --- models without a class in transformers: equations written out in the test over a dict of our tensors

Equations = Callable[[dict[str, Tensor], dict[str, Tensor]], Tensor]


def under(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors of one part, by their names within it."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


@torch.no_grad()
def check_equations(config: ModelConfig, equations: Equations, blind: tuple[str, ...] = ()) -> int:
    """Both precisions, padded and not, both kernels; then every one-field error. `equations(weights, inputs)`."""
    torch.manual_seed(0)
    network = Transformer(config).eval()
    rerandomize(network, lambda name, parameter: None)
    case = Case("equations", lambda: network)
    for dtype, tolerance in ((torch.float64, case.tolerance_float64), (torch.float32, case.tolerance)):
        network.to(dtype)
        for padded in (False, True):
            given = inputs(case, config, padded)
            theirs = equations(network.state_dict(), given)
            assert theirs.abs().max() > 0.1, "equations without effect compare nothing"
            for kernel in (fused_attention, reference_attention):
                found = difference(network(**given, kernel=kernel), theirs, given)
                assert found <= tolerance, f"padded={padded} {dtype} {kernel.__name__}: {found:.2e}"
    wrong = dict(mutants(config))
    seen_ones = {path for path in wrong if seen(wrong[path], network.state_dict(), given, theirs, case.tolerance)}
    missed = [path for path in wrong if path not in seen_ones and not any(part in path for part in blind)]
    assert not missed, f"errors that no comparison sees: {missed}"
    return len(seen_ones)


@torch.no_grad()
def seen(
    config: ModelConfig, weights: dict[str, Tensor], given: dict[str, Tensor], theirs: Tensor, tolerance: float
) -> bool:
    mutant = Transformer(config).eval()
    if layout(mutant.state_dict()) != layout(weights):
        return True  # fill() refuses the checkpoint by name or shape
    mutant.load_state_dict(weights)
    found = difference(mutant(**given), theirs, given)
    return not found <= tolerance  # NaN counts as seen


def layout(weights: dict[str, Tensor]) -> set[tuple[str, torch.Size]]:
    """Names and shapes; of a tensor that stands in two places the first name."""
    first = {tensor.data_ptr(): (name, tensor.shape) for name, tensor in reversed(weights.items())}
    return set(first.values())

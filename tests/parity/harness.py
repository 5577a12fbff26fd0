"""Compare our networks with transformers at toy size: same checkpoint on disk, same inputs, every logit.

A family's test lists its reference models as `Case`s and runs four checks on each:

    check_logits       the logits agree in float32, with and without padding, with both attention kernels
    check_float64      they agree to 1e-12 in float64, which excludes errors that hide in the rounding of float32
    check_round_trip   what we save is what transformers saved, and transformers computes the same from it
    check_mutants      the comparison detects an error in any single field of our config

Models without a class in transformers are compared with their published equations: see equations.py.

The usual initialization hides a tenth of all errors (a GELU variant, a scale, a bias that is zero). Therefore every
parameter is drawn anew with an effect of order one, and the cases' configs give norms a large epsilon.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from clearhead.architecture import AudioEmbedding, ModelConfig
from clearhead.checkpoint.huggingface import load_folder, save_folder
from clearhead.families import Settings, family_for
from clearhead.model import Transformer, fused_attention, reference_attention
from tests.parity.mutants import mutants

VOCAB, BATCH, LENGTH = 97, 2, 24
MIN_EFFECT = 0.1  # a reference whose largest logit is smaller would compare nothing

Draw = Callable[[str, Tensor], Tensor | None]  # name, parameter -> its new value; None: the default


def draw_default(name: str, parameter: Tensor) -> None:
    """Leave every parameter to the default of `randomize`."""


@dataclass(frozen=True)
class Case:
    """A reference model at toy size, and how to compare with it."""

    name: str
    build: Callable[[], nn.Module]  # returns the transformers model
    length: int = LENGTH  # tokens of a sequence
    tolerance: float = 1e-5
    tolerance_float64: float = 1e-12
    draw: Draw = draw_default
    takes_position_ids: bool = True  # the reference accepts position_ids
    output: str = "logits"  # attribute of the reference's output that is compared
    undetectable: tuple[str, ...] = ()  # parts of the paths of fields whose small errors this case cannot detect
    same_tensors: bool = True  # the tensors we save equal those that transformers saves
    first_token: int = 0  # smallest token id of the inputs; to RoBERTa, the id of the padding token is padding anywhere
    rows_alone: bool = False  # the reference reads each text of a padded batch alone, without padding
    not_saved: str = "$."  # pattern of tensors that transformers saves and we compute; the default matches none

    def __str__(self) -> str:
        return self.name


def build_reference(case: Case, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the reference with all parameters and all saved buffers drawn anew."""
    torch.manual_seed(0)
    model = case.build().eval()
    randomize(model, case.draw)
    return model.to(dtype)


@torch.no_grad()
def randomize(model: nn.Module, draw: Draw = draw_default) -> None:
    """Draw every parameter and saved buffer anew.

    Embeddings have standard deviation 0.3, matrices fan_in ** -0.5, vectors 0.3 around 0, norm weights 0.3 around 1.
    """
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    saved = set(model.state_dict())
    tensors = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n in saved}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        value = draw(name, tensor)
        if value is None and id(tensor) in tables:
            value = 0.3 * torch.randn_like(tensor)
        elif value is None and tensor.ndim >= 2:
            value = torch.randn_like(tensor) * fan_in(name, tensor, model) ** -0.5
        elif value is None:
            is_norm = "norm" in name.lower() or "ln_" in name or name.endswith(("layer_norm.weight", "ln.weight"))
            value = float(is_norm and name.endswith("weight")) + 0.3 * torch.randn_like(tensor)
        tensor.copy_(value)


def fan_in(name: str, tensor: Tensor, model: nn.Module) -> int:
    """Return the number of inputs of a matrix."""
    owner = model.get_submodule(name.rpartition(".")[0])
    stored_in_out = type(owner).__name__ in ("Conv1D", "Llama4TextExperts", "GptOssExperts")
    return tensor.shape[-2] if stored_in_out else tensor.shape[-1]


def load_network(model: nn.Module, folder: Path) -> Transformer:
    """Save a transformers model to disk and load it as our network, as a user would."""
    model.save_pretrained(folder)
    return load_folder(folder).network


def make_inputs(case: Case, config: ModelConfig, padded: bool) -> dict[str, Tensor]:
    """Return the arguments of our network.

    One stack takes tokens, attention_mask and position_ids; an encoder-decoder takes source, target and their masks.
    """
    generator = torch.Generator().manual_seed(1)

    def draw_tokens(length: int) -> Tensor:
        return torch.randint(case.first_token, config.vocab_size, (BATCH, length), generator=generator)

    def make_mask(length: int, left: bool) -> Tensor:
        mask = torch.ones(BATCH, length, dtype=torch.long)
        if padded:
            mask[1, : length // 4] = 0
        return mask if left else mask.flip(1)

    if config.encoder is not None and isinstance(config.encoder.embedding, AudioEmbedding):
        audio, target = config.encoder.embedding, draw_tokens(case.length - 5)
        features = torch.randn(BATCH, audio.num_mel_bands, 2 * audio.num_positions, generator=generator)
        return {"source": features, "target": target, "target_mask": torch.ones_like(target)}
    if config.is_encoder_decoder:
        source, target = draw_tokens(case.length), draw_tokens(case.length - 5)
        return {
            "source": source,
            "target": target,
            "source_mask": make_mask(case.length, left=False),
            "target_mask": torch.ones_like(target),
        }
    # Decoders are padded on the left, where padding shifts every position; encoders on the right.
    attention_mask = make_mask(case.length, left=config.decoder is not None)
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return {"tokens": draw_tokens(case.length), "attention_mask": attention_mask, "position_ids": positions}


def run_reference(model: nn.Module, case: Case, inputs: dict[str, Tensor]) -> Tensor:
    """Return the reference's output for the arguments of our network."""
    if case.rows_alone and not bool(inputs["attention_mask"].all()):
        return _run_rows(model, case, inputs)
    if inputs.get("source") is not None and inputs["source"].is_floating_point():
        arguments = {
            "input_features": inputs["source"].to(model.dtype),
            "decoder_input_ids": inputs["target"],
            "decoder_attention_mask": inputs["target_mask"],
        }
    elif "target" in inputs:
        arguments = {
            "input_ids": inputs["source"],
            "attention_mask": inputs["source_mask"],
            "decoder_input_ids": inputs["target"],
            "decoder_attention_mask": inputs["target_mask"],
        }
    else:
        arguments = {"input_ids": inputs["tokens"], "attention_mask": inputs["attention_mask"]}
        if case.takes_position_ids:
            arguments["position_ids"] = inputs["position_ids"]
    with torch.no_grad():
        output = model(**arguments, **({"use_cache": False} if hasattr(model.config, "use_cache") else {}))
    return getattr(output, case.output)


def _run_rows(model: nn.Module, case: Case, inputs: dict[str, Tensor]) -> Tensor:
    """Return the reference's output for each text alone; it is zero at padding."""
    rows: list[Tensor] = []
    for row, is_real in enumerate(inputs["attention_mask"].bool()):
        alone = {name: tensor[row, is_real][None] for name, tensor in inputs.items()}
        first = {name: tensor[:, :1] for name, tensor in alone.items()}
        run_reference(model, case, first)  # a short text makes transformers forget the length of an earlier one
        output = run_reference(model, case, alone)[0]
        rows.append(output.new_zeros(len(is_real), output.shape[-1]))
        rows[-1][is_real] = output
    return torch.stack(rows)


def largest_difference(ours: Tensor, theirs: Tensor, inputs: dict[str, Tensor]) -> float:
    """Return the largest difference at real tokens; the output at padding is not defined."""
    mask = inputs.get("attention_mask", inputs.get("target_mask"))
    assert mask is not None
    assert ours.shape == theirs.shape
    if ours.ndim == 2:  # one row of scores per text
        return (ours - theirs).abs().max().item()
    return (ours - theirs)[mask.bool()].abs().max().item()


@contextlib.contextmanager
def float32_as_float64() -> Iterator[None]:
    """Let code that casts to float32 cast to float64 instead, as parts of transformers do in any precision."""
    original = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = original
        torch.set_default_dtype(torch.float32)


# --- the checks that every family passes


def check_logits(case: Case, folder: Path, **options: bool) -> None:
    """Check that the logits agree in float32, with and without padding, with both attention kernels.

    `options` are passed to our network.
    """
    model = build_reference(case)
    network = load_network(model, folder)
    for padded in (False, True):
        inputs = make_inputs(case, network.config, padded)
        theirs = run_reference(model, case, inputs)
        assert theirs.abs().max() > MIN_EFFECT
        for kernel in (fused_attention, reference_attention):
            with torch.no_grad():
                difference = largest_difference(network(**inputs, kernel=kernel, **options), theirs, inputs)
            assert difference <= case.tolerance, f"padded={padded} {kernel.__name__}: {difference:.2e}"


def check_float64(case: Case, folder: Path, **options: bool) -> None:
    """Check that the logits agree to 1e-12 in float64, with padding."""
    with float32_as_float64():  # includes tables that the constructor computes, such as rotary frequencies
        model = build_reference(case, torch.float64)
    model.config._experts_implementation = "eager"
    network = load_network(model, folder)
    inputs = make_inputs(case, network.config, padded=True)
    with float32_as_float64():
        theirs = run_reference(model, case, inputs)
    with torch.no_grad():
        ours = network(**inputs, **options)
    assert ours.dtype == torch.float64
    difference = largest_difference(ours, theirs, inputs)
    assert difference <= case.tolerance_float64, f"{difference:.2e}"


def check_round_trip(case: Case, folder: Path) -> None:
    """Check transformers -> ours -> transformers: equal tensors, a config that reads back, equal logits."""
    model = build_reference(case)
    model.save_pretrained(folder / "theirs")
    loaded = load_folder(folder / "theirs")
    config = loaded.network.config
    family_saved = save_folder(loaded.network, folder / "ours", loaded.family, loaded.special_ids)
    for family in (family_saved, family_for(config)):
        assert family.read_config is not None
        assert family.write_config is not None
        assert family.read_config(Settings(family.write_config(config), "written")) == config
    if case.same_tensors:
        theirs = load_file(folder / "theirs" / "model.safetensors")
        ours = load_file(folder / "ours" / "model.safetensors")
        assert ours.keys() == {name for name in theirs if not re.fullmatch(case.not_saved, name)}
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    reloaded = type(model).from_pretrained(folder / "ours", attn_implementation="eager").eval()
    inputs = make_inputs(case, config, padded=False)
    assert torch.equal(run_reference(reloaded, case, inputs), run_reference(model, case, inputs))


def check_briefly(case: Case, folder: Path) -> None:
    """Check float32 with padding, float64 and the round trip, for families whose other checks are marked slow."""
    check_float64(case, folder / "float64")
    check_round_trip(case, folder)
    network = load_folder(folder / "theirs").network
    model = build_reference(case)
    inputs = make_inputs(case, network.config, padded=True)
    theirs = run_reference(model, case, inputs)
    assert theirs.abs().max() > MIN_EFFECT
    with torch.no_grad():
        assert largest_difference(network(**inputs), theirs, inputs) <= case.tolerance


def check_mutants(case: Case, folder: Path) -> int:
    """Check that every error in one field of our config is detected; return how many there are.

    An error is detected if the checkpoint no longer fits or a logit changes by more than the tolerance.
    """
    model = build_reference(case)
    network = load_network(model, folder)
    inputs = make_inputs(case, network.config, padded=True)
    theirs = run_reference(model, case, inputs)
    weights = network.state_dict()
    num_detected, missed = 0, []
    for path, config in mutants(network.config):
        if is_detected(config, weights, inputs, theirs, case.tolerance):
            num_detected += 1
        elif not any(part in path for part in case.undetectable):
            missed.append(path)
    assert not missed, f"errors that the comparison does not detect: {missed}"
    return num_detected


@torch.no_grad()
def is_detected(
    config: ModelConfig, weights: dict[str, Tensor], inputs: dict[str, Tensor], theirs: Tensor, tolerance: float
) -> bool:
    """Return whether a wrong config does not fit the weights, or gives other logits than the reference."""
    with torch.device("meta"), _nothing_drawn():  # without weights of its own
        mutant = Transformer(config).eval()
    if tensor_shapes(mutant.state_dict()) != tensor_shapes(weights):
        return True  # loading a checkpoint would report the name or the shape
    mutant.load_state_dict(weights, assign=True)
    ours = mutant(**inputs)
    if ours.shape != theirs.shape:  # scores of tokens in the place of scores of texts
        return True
    difference = largest_difference(ours, theirs, inputs)
    return not difference <= tolerance  # NaN counts as detected


@contextlib.contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Let modules of PyTorch draw no initial weights: tensors without data took a third of the time of all mutants."""
    with contextlib.ExitStack() as stack:
        for part in (nn.Linear, nn.Embedding, nn.LayerNorm):
            stack.enter_context(mock.patch.object(part, "reset_parameters"))
        yield


def tensor_shapes(weights: dict[str, Tensor]) -> set[tuple[str, torch.Size]]:
    """Return names and shapes; a tensor that has two names counts under the first."""
    by_address = {tensor.untyped_storage()._cdata: (name, tensor.shape) for name, tensor in reversed(weights.items())}
    return set(by_address.values())

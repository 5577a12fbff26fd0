"""Compare our networks with published equations, for models that transformers has no class for.

The test of a family writes out its equations over a dict of our tensors; `check_equations` compares every logit.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from clearhead.architecture import ModelConfig
from clearhead.model import Transformer, fused_attention, reference_attention
from tests.parity.harness import MIN_EFFECT, Case, is_detected, largest_difference, make_inputs, randomize
from tests.parity.mutants import mutants

Equations = Callable[[dict[str, Tensor], dict[str, Tensor]], Tensor]  # weights, inputs -> logits


def tensors_under(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


@torch.no_grad()
def check_equations(config: ModelConfig, equations: Equations, undetectable: tuple[str, ...] = ()) -> int:
    """Check that our network computes the equations, and return how many errors in our config are detected.

    The logits must agree in both precisions, with and without padding, with both attention kernels; and an error in any
    single field of the config must be detected.
    """
    torch.manual_seed(0)
    network = Transformer(config).eval()
    randomize(network)
    case = Case("equations", lambda: network)
    for dtype, tolerance in ((torch.float64, case.tolerance_float64), (torch.float32, case.tolerance)):
        network.to(dtype)
        for padded in (False, True):
            inputs = make_inputs(case, config, padded)
            theirs = equations(network.state_dict(), inputs)
            assert theirs.abs().max() > MIN_EFFECT
            for kernel in (fused_attention, reference_attention):
                difference = largest_difference(network(**inputs, kernel=kernel), theirs, inputs)
                assert difference <= tolerance, f"padded={padded} {dtype} {kernel.__name__}: {difference:.2e}"
    wrong_configs = dict(mutants(config))
    weights = network.state_dict()
    detected = {
        path
        for path, wrong_config in wrong_configs.items()
        if is_detected(wrong_config, weights, inputs, theirs, case.tolerance)
    }
    missed = [path for path in wrong_configs if path not in detected and not any(part in path for part in undetectable)]
    assert not missed, f"errors that the comparison does not detect: {missed}"
    return len(detected)

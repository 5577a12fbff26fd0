"""MixtureBranch against the module, for few tokens in its kernels and for many in grouped products."""

import pytest
import torch

from clearhead.backends.cuda import mixture
from clearhead.backends.cuda.mixture import MixtureBranch
from tests.backends.networks import toy_network

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("most_in_kernels", [16, 0])
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "llama-4-scout", "grok-1"])
@torch.no_grad()
def test_a_mixture_gives_the_output_of_its_module(name, num_tokens, most_in_kernels, monkeypatch):
    """Softmax and sigmoid scores, groups, a selection bias, shared experts, and weights on the input or the output."""
    monkeypatch.setattr(mixture, "_MAX_CAPTURED_ROWS", most_in_kernels)
    network = toy_network(name).to(DEVICE)
    module = network.decoder.layers[-1].feed_forward
    x = torch.randn(num_tokens, network.config.width, device=DEVICE)
    branch = MixtureBranch(module, module.shared)
    torch.testing.assert_close(branch(x, None), module(x[None])[0], atol=1e-5, rtol=1e-4)

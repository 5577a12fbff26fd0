"""A mixture of experts on the GPU without waiting for the host: which experts run is never known there.

branch = MixtureBranch(module, shared=None); y = branch(x, step)      # (T, D) -> (T, D)
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from clearhead.backends.cuda.launch import power_of_two
from clearhead.model import ACTIVATIONS, MixtureLayer, apply_softcap

_MAX_KERNEL_ROWS = 16  # up to this many tokens, each one reads the matrices of its own experts
# A captured step of up to this many tokens must not wait for the host; only in bfloat16 do grouped products not wait.
_MAX_CAPTURED_ROWS = 512
_MAX_CHOSEN = 16  # up to this many experts per token, the kernel unrolls its loop


@dataclass(frozen=True)
class MixtureBranch:
    """The router, the experts and the shared expert of a layer."""

    module: MixtureLayer
    shared: Callable[[Tensor], Tensor] | None

    def __call__(self, x: Tensor, step: object) -> Tensor:
        """Normalized x (T, D) -> (T, D)."""
        weights, chosen = self._choose(x)
        most = _MAX_KERNEL_ROWS if x.dtype == torch.bfloat16 else _MAX_CAPTURED_ROWS
        is_few = len(x) <= most and chosen.shape[1] <= _MAX_CHOSEN
        out = self._multiply_few(x, weights, chosen) if is_few else self._multiply_groups(x, weights, chosen)
        if self.shared is not None:
            out = out + self.shared(x)
        divisor = self.module.config.divisor
        return out / divisor if divisor != 1.0 else out

    def _choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of the experts of every token, both (T, num_chosen)."""
        from clearhead.backends.cuda.triton_experts import choose_experts

        router, config = self.module.router, self.module.router.config
        # The kernel chooses by the logits alone; PyTorch chooses among groups and with a bias.
        if router.selection_bias is not None or config.groups is not None or router.num_chosen > _MAX_CHOSEN:
            weights, chosen = router(x)
            return weights.to(x.dtype), chosen
        logits = apply_softcap(functional.linear(x.float(), router.weight.float()), config.softcap)
        num_experts, shape = logits.shape[1], (len(x), router.num_chosen)
        weights, chosen = x.new_empty(shape), torch.empty(shape, dtype=torch.int64, device=x.device)
        epsilon = config.renormalize_epsilon
        choose_experts[(len(x),)](
            chosen, weights, logits, epsilon or 0.0, config.scale, E=num_experts,
            BLOCK_E=max(16, power_of_two(num_experts)), CHOSEN=router.num_chosen, SIGMOID=config.score == "sigmoid",
            RENORMALIZE=epsilon is not None, num_warps=1,
        )  # fmt: skip
        return weights, chosen

    def _multiply_few(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Run every pair of a token and one of its experts as products of a matrix and a vector."""
        from clearhead.backends.cuda.triton_experts import close_experts, open_experts

        module, (num_tokens, num_chosen) = self.module, chosen.shape
        width, expert_width = x.shape[1], module.up.shape[1]
        weighs_input = module.config.router.weighs == "input"
        inner = x.new_empty(num_tokens * num_chosen, expert_width)
        chosen, weights, x = chosen.contiguous(), weights.contiguous(), x.contiguous()
        open_experts[num_tokens * num_chosen, -(-expert_width // 8)](
            inner, x, module.up if module.gate is None else module.gate, module.up, chosen, weights,
            F=expert_width, D=width, CHOSEN=num_chosen, GATED=module.gate is not None,
            ACTIVATION=module.config.expert.activation, WEIGH=weighs_input, BLOCK_N=8,
            BLOCK_K=min(1024, max(16, power_of_two(width))), num_warps=4,
        )  # fmt: skip
        y = torch.empty_like(x)
        close_experts[num_tokens, -(-width // 8)](
            y, inner, module.down, chosen, weights,
            F=expert_width, D=width, CHOSEN=num_chosen, WEIGH=not weighs_input, BLOCK_N=8,
            BLOCK_K=min(1024, max(16, power_of_two(expert_width))), num_warps=4,
        )  # fmt: skip
        return y

    def _multiply_groups(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sort the tokens by expert and multiply all groups in one call per matrix."""
        module, num_chosen = self.module, chosen.shape[1]
        experts, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(len(module.up), device=x.device), right=True).int()
        tokens = x[order // num_chosen]
        weighs_input = module.config.router.weighs == "input"
        if weighs_input:
            tokens = tokens * weights.flatten()[order, None]
        activation = ACTIVATIONS[module.config.expert.activation]
        inner = _grouped_product(tokens, module.up, ends)
        if module.gate is None:
            inner = activation(inner)
        else:
            inner = activation(_grouped_product(tokens, module.gate, ends)) * inner
        sorted_out = _grouped_product(inner, module.down, ends)
        out = torch.empty_like(sorted_out)
        out[order] = sorted_out
        out = out.view(*chosen.shape, -1)
        return (out if weighs_input else out * weights[..., None]).sum(1)


def _grouped_product(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply sorted rows x (M, K) with matrices (E, N, K): expert e has the rows from ends[e - 1] to ends[e]."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch._grouped_mm(x, matrices.transpose(1, 2), offs=ends)
    bounds = [0, *ends.tolist()]
    parts = [x[start:stop] @ matrix.T for start, stop, matrix in zip(bounds, bounds[1:], matrices, strict=False)]
    return torch.cat(parts)

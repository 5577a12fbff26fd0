"""Mixture of experts: a router sends each token through a few of many feed-forward experts.

    layer = MixtureLayer(Experts(num_experts=8, num_chosen=2, expert=..., router=Router(score="softmax")), width=64)

No token is dropped. For each token x:

    logits   z = W_r x
    scores   p = softmax(z) or σ(z), over all experts
    chosen   the experts with the largest p (+ selection bias), within the best groups
    weights  w = p of the chosen experts (÷ their sum) · scale
    output   y = Σ w_e E_e(x), or Σ E_e(w_e x), + shared(x) (· σ(w_s x))
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.architecture import ExpertGroups, Experts
from clearhead.model.attend import apply_softcap
from clearhead.model.feed_forward import ACTIVATIONS, FeedForwardLayer, multiply_gate


class RouterLayer(nn.Module):
    """Choose the experts of each token and their weights."""

    selection_bias: Tensor | None

    def __init__(self, config: Experts, width: int):
        super().__init__()
        self.config = config.router
        self.num_chosen = config.num_chosen
        self.weight = nn.Parameter(torch.empty(config.num_experts, width))
        self.bias = nn.Parameter(torch.zeros(config.num_experts)) if config.router.bias else None
        bias = torch.zeros(config.num_experts) if config.router.selection_bias else None
        self.register_buffer("selection_bias", bias)  # updated by load balancing, not by gradients

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (M, D) -> weights and expert numbers, both (M, num_chosen).

        Everything is computed in float32 or higher, since rounding could change a choice between close scores.
        """
        logits = self.logits(x)
        scores = self.scores(logits)
        # Sigmoids of large logits tie at 1. Unless the choice adds something to the scores, choose by the logits.
        adds_to_scores = self.selection_bias is not None or self.config.groups is not None
        chosen = self.choose(scores if adds_to_scores else logits)
        weights = scores.gather(1, chosen)
        if self.config.renormalize_epsilon is not None:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + self.config.renormalize_epsilon)
        return weights * self.config.scale, chosen

    def logits(self, x: Tensor) -> Tensor:
        """x (M, D) -> (M, E)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        return apply_softcap(functional.linear(x.to(dtype), self.weight.to(dtype), bias), self.config.softcap)

    def scores(self, logits: Tensor) -> Tensor:
        """logits (M, E) -> (M, E)."""
        return logits.softmax(dim=-1) if self.config.score == "softmax" else logits.sigmoid()

    def choose(self, scores: Tensor) -> Tensor:
        """scores (M, E) -> numbers of the chosen experts (M, num_chosen)."""
        if self.selection_bias is not None:
            scores = scores + self.selection_bias.to(scores.dtype)
        if self.config.groups is not None:
            scores = keep_best_groups(scores, self.config.groups)
        return scores.topk(self.num_chosen, dim=-1, sorted=False).indices


def keep_best_groups(scores: Tensor, groups: ExpertGroups) -> Tensor:
    """Set the scores (M, E) of all experts outside the best groups to -∞. A group is a run of adjacent experts."""
    grouped = scores.unflatten(1, (groups.num_groups, -1))  # (M, groups, E / groups)
    group_scores = grouped.topk(1 if groups.scored_by == "max" else 2, dim=-1).values.sum(dim=-1)
    best = group_scores.topk(groups.num_kept, dim=-1, sorted=False).indices
    is_excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, best, False)
    return grouped.masked_fill(is_excluded[..., None], -torch.inf).flatten(1)


class MixtureLayer(nn.Module):
    """A router, its experts, and optionally a shared expert that every token passes through."""

    def __init__(self, config: Experts, width: int, dropout: float = 0.0):
        super().__init__()
        self.config = config
        num_experts, expert_width = config.num_experts, config.expert.width
        self.activation = ACTIVATIONS[config.expert.activation]
        self.router = RouterLayer(config, width)
        self.gate = nn.Parameter(torch.empty(num_experts, expert_width, width)) if config.expert.gated else None
        self.up = nn.Parameter(torch.empty(num_experts, expert_width, width))
        self.down = nn.Parameter(torch.empty(num_experts, width, expert_width))
        has_bias, has_gate = config.expert.bias, config.expert.bias and config.expert.gated
        self.gate_bias = nn.Parameter(torch.zeros(num_experts, expert_width)) if has_gate else None
        self.up_bias = nn.Parameter(torch.zeros(num_experts, expert_width)) if has_bias else None
        self.down_bias = nn.Parameter(torch.zeros(num_experts, width)) if has_bias else None
        self.shared = None if config.shared is None else FeedForwardLayer(config.shared, width, dropout)
        self.shared_gate = nn.Linear(width, 1, bias=False) if config.shared_gate else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, D) -> (B, T, D), as M = B·T independent tokens.

        Which experts run depends on the data, so torch.compile breaks its graph here. An exported graph has no place
        for that: every expert runs for every token in it.
        """
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens)
        run = self.run_all if torch.compiler.is_exporting() else self.run_chosen
        out = run(tokens, weights.to(x.dtype), chosen)
        if self.shared is not None:
            shared = self.shared(tokens)
            out = out + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(tokens)) * shared)
        return (out / self.config.divisor if self.config.divisor != 1.0 else out).view_as(x)

    def run_chosen(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Run each expert on the tokens that chose it. weights, chosen (M, num_chosen) -> (M, D)."""
        out = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            token, choice = torch.where(chosen == expert)
            weight = weights[token, choice, None]
            if self.config.router.weighs == "input":
                expert_out = self.run_expert(expert, tokens[token] * weight)
            else:
                expert_out = self.run_expert(expert, tokens[token]) * weight
            out.index_add_(0, token, expert_out.to(out.dtype))  # under autocast, experts return another dtype
        return out

    def run_all(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Run every expert on every token, with weight 0 where it was not chosen: no size depends on the data."""
        out = torch.zeros_like(tokens)
        for expert in range(self.config.num_experts):
            is_chosen = chosen == expert
            weight = (weights * is_chosen).sum(dim=-1, keepdim=True)
            if self.config.router.weighs == "input":
                out = out + self.run_expert(expert, tokens * weight) * is_chosen.any(dim=-1, keepdim=True)
            else:
                out = out + self.run_expert(expert, tokens) * weight
        return out

    def run_expert(self, expert: int, x: Tensor) -> Tensor:
        """Run tokens (m, D) through one expert: (m, D)."""
        hidden = _add_bias(self.multiply(x, self.up, expert), self.up_bias, expert)
        if self.gate is None:
            hidden = self.activation(hidden)
        else:
            gate = _add_bias(self.multiply(x, self.gate, expert), self.gate_bias, expert)
            hidden = multiply_gate(gate, hidden, self.activation, self.config.expert.clamp)
        return _add_bias(self.multiply(self.dropout(hidden), self.down, expert), self.down_bias, expert)

    def multiply(self, x: Tensor, matrices: Tensor, expert: int) -> Tensor:
        """Return x Wᵀ with the matrix W of one expert. Packed weights override this (backends/packed)."""
        return functional.linear(x, matrices[expert])


def _add_bias(x: Tensor, biases: Tensor | None, expert: int) -> Tensor:
    """Add the bias of one expert to x (m, F or D), if experts have one."""
    return x if biases is None else x + biases[expert]

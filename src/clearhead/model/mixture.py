"""Mixture of experts: a router sends each token through a few feed-forwards of many; none is ever dropped.

layer = MixtureLayer(Experts(num_experts=8, num_chosen=2, expert=..., router=Router(score="softmax")), width=64)

score z = W_r x -> p = softmax(z) or σ(z), over all experts -> choice by p (+ bias), within the best groups
-> weight w = p of the chosen (÷ sum) · scale -> Σ w_e E_e(x), or Σ E_e(w_e x) -> + shared(x)
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.architecture import ExpertGroups, Experts
from clearhead.model.attend import softcap_scores
from clearhead.model.feed_forward import ACTIVATIONS, FeedForwardLayer


class RouterLayer(nn.Module):
    selection_bias: Tensor | None

    def __init__(self, config: Experts, width: int):
        super().__init__()
        self.config, self.num_chosen = config.router, config.num_chosen
        self.weight = nn.Parameter(torch.empty(config.num_experts, width))
        bias = torch.zeros(config.num_experts) if config.router.selection_bias else None
        self.register_buffer("selection_bias", bias)  # moved by balancing, not by gradients

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (M, D) -> weights and expert numbers, both (M, num_chosen). In float32 at least: near ties decide."""
        logits = self.logits(x)
        scores = self.scores(logits)
        # Sigmoids of large logits tie at 1, so where the scores are not added to anything the logits decide.
        added_to = self.selection_bias is not None or self.config.groups is not None
        chosen = self.choose(scores if added_to else logits)
        weights = scores.gather(1, chosen)
        if self.config.renormalize_epsilon is not None:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + self.config.renormalize_epsilon)
        return weights * self.config.scale, chosen

    def logits(self, x: Tensor) -> Tensor:
        """x (M, D) -> (M, E)."""
        precise = torch.promote_types(x.dtype, torch.float32)
        return softcap_scores(functional.linear(x.to(precise), self.weight.to(precise)), self.config.softcap)

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=-1) if self.config.score == "softmax" else logits.sigmoid()

    def choose(self, scores: Tensor) -> Tensor:
        if self.selection_bias is not None:
            scores = scores + self.selection_bias.to(scores.dtype)
        if self.config.groups is not None:
            scores = keep_best_groups(scores, self.config.groups)
        return scores.topk(self.num_chosen, dim=-1, sorted=False).indices


def keep_best_groups(scores: Tensor, groups: ExpertGroups) -> Tensor:
    """-∞ for experts outside the best groups. scores (M, E), groups are neighbours."""
    grouped = scores.view(len(scores), groups.num_groups, -1)  # (M, groups, E / groups)
    best = grouped.topk(1 if groups.scored_by == "max" else 2, dim=-1).values.sum(dim=-1)
    kept = best.topk(groups.num_kept, dim=-1, sorted=False).indices
    outside = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
    return grouped.masked_fill(outside[..., None], -torch.inf).flatten(1)


class MixtureLayer(nn.Module):
    def __init__(self, config: Experts, width: int, dropout: float = 0.0):
        super().__init__()
        self.config = config
        experts, inner = config.num_experts, config.expert.width
        self.activation = ACTIVATIONS[config.expert.activation]
        self.router = RouterLayer(config, width)
        self.gate = nn.Parameter(torch.empty(experts, inner, width)) if config.expert.gated else None
        self.up = nn.Parameter(torch.empty(experts, inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, inner))
        self.shared = None if config.shared is None else FeedForwardLayer(config.shared, width, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, D) -> (B, T, D); tokens are taken as one list of M = B·T.

        Who runs is read from the numbers, so torch.compile breaks its graph here: sizes that are known beforehand would
        mean every expert for every token.
        """
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens)
        weights = weights.to(x.dtype)
        out = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            row, place = torch.where(chosen == expert)
            weight = weights[row, place, None]
            if self.config.router.weighs == "input":
                part = self.run_expert(expert, tokens[row] * weight)
            else:
                part = self.run_expert(expert, tokens[row]) * weight
            out.index_add_(0, row, part.to(out.dtype))  # autocast gives experts another
        if self.shared is not None:
            out = out + self.shared(tokens)
        return (out / self.config.divisor if self.config.divisor != 1.0 else out).view_as(x)

    def run_expert(self, expert: int, x: Tensor) -> Tensor:
        inner = self.multiply(x, self.up, expert)
        if self.gate is None:
            inner = self.activation(inner)
        else:
            inner = self.activation(self.multiply(x, self.gate, expert)) * inner
        return self.multiply(self.dropout(inner), self.down, expert)

    def multiply(self, x: Tensor, experts: Tensor, expert: int) -> Tensor:
        return functional.linear(x, experts[expert])

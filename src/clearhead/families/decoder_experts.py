"""Mixtures of experts in the rows of the decoder tables: their settings, read and written.

ExpertRow(num_experts=ExpertSetting("num_local_experts", 8), num_chosen=ExpertSetting("num_experts_per_tok", 2))
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clearhead.architecture import Activation, ExpertGroups, Experts, FeedForward, GateClamp, Router, Stack
from clearhead.families.family import require_type
from clearhead.families.llama_style import activation_name, first_experts, first_feed_forward, gated_feed_forward
from clearhead.families.settings import Settings


@dataclass(frozen=True)
class ExpertSetting:
    """A number in config.json and what its absence means to transformers."""

    name: str
    default: Any = None

    def integer(self, settings: Settings) -> int:
        """Return the value as a whole number."""
        return settings.integer(self.name, self.default)


def _softmax_router(settings: Settings, renormalized: bool) -> Router:
    """Return a router that weights experts by a softmax over all of them."""
    return Router(score="softmax", renormalize_epsilon=0.0 if renormalized else None)


def _write_no_settings(router: Router) -> dict[str, Any]:
    """Return no settings: those of the router are fixed."""
    return {}


def grouped_router(settings: Settings, renormalized: bool) -> Router:
    """Return DeepSeek-V3's router: sigmoids, a bias for the choice, and groups of experts."""
    num_groups = settings.integer("n_group", 1)
    num_kept = settings.integer("topk_group", 1)
    groups = None
    if num_groups != 1 or num_kept != 1:
        groups = ExpertGroups(num_groups=num_groups, num_kept=num_kept, scored_by="top2_sum")
    return Router(
        score="sigmoid",
        selection_bias=True,
        groups=groups,
        renormalize_epsilon=1e-20 if renormalized else None,
        scale=settings.number("routed_scaling_factor", 1.0),
    )


def write_grouped_router(router: Router) -> dict[str, Any]:
    """Return the settings of DeepSeek-V3's router."""
    return {
        "n_group": router.groups.num_groups if router.groups else 1,
        "topk_group": router.groups.num_kept if router.groups else 1,
        "routed_scaling_factor": router.scale,
    }


@dataclass(frozen=True, kw_only=True)
class ExpertRow:
    """The mixtures of experts of one model type. Without `sparse_layers`, every layer is one."""

    num_experts: ExpertSetting
    num_chosen: ExpertSetting
    width: ExpertSetting = ExpertSetting("moe_intermediate_size")
    activation: Activation | None = None  # None: `hidden_act`
    renormalized: tuple[str, bool] | bool = True  # the weights are divided by their sum; a setting and its default
    shared_width: ExpertSetting | None = None
    shared_count: ExpertSetting | None = None  # the shared expert is as wide as this many experts
    shared_gate: bool = False
    clamp: tuple[str, float] | None = None  # the setting of the limit and its default
    bias: bool = False
    router: Callable[[Settings, bool], Router] = _softmax_router
    write_router: Callable[[Router], dict[str, Any]] = _write_no_settings
    sparse_layers: Callable[[Settings, int], Sequence[bool]] | None = None
    write_sparse_layers: Callable[[list[bool]], dict[str, Any]] | None = None

    def read(self, settings: Settings, num_layers: int) -> list[FeedForward | Experts]:
        """Return the feed-forward of each layer."""
        experts = self.read_experts(settings)
        if self.sparse_layers is None:
            return [experts] * num_layers
        activation = settings.activation("hidden_act", "silu")
        dense = gated_feed_forward(settings.integer("intermediate_size"), activation)
        return [experts if is_sparse else dense for is_sparse in self.sparse_layers(settings, num_layers)]

    def read_experts(self, settings: Settings) -> Experts:
        """Return the mixture of experts."""
        activation = self.activation or settings.activation("hidden_act", "silu")
        clamp = None if self.clamp is None else GateClamp(limit=settings.number(*self.clamp))
        width = self.width.integer(settings)
        expert = FeedForward(width=width, activation=activation, gated=True, bias=self.bias, clamp=clamp)
        renormalized = (
            self.renormalized if isinstance(self.renormalized, bool) else settings.boolean(*self.renormalized)
        )
        router = self.router(settings, renormalized)
        shared = None
        if self.shared_width is not None:
            shared = gated_feed_forward(self.shared_width.integer(settings), activation)
        if self.shared_count is not None:
            shared = gated_feed_forward(self.shared_count.integer(settings) * width, activation)
        return Experts(
            num_experts=self.num_experts.integer(settings),
            num_chosen=self.num_chosen.integer(settings),
            expert=expert,
            router=replace(router, bias=self.bias),
            shared=shared,
            shared_gate=self.shared_gate,
        )

    def write(self, stack: Stack) -> dict[str, Any]:
        """Return the settings of the experts and, if there are any, of the dense layers."""
        experts, dense = first_experts(stack), first_feed_forward(stack)
        experts = require_type(Experts, experts)
        data = {
            self.num_experts.name: experts.num_experts,
            self.num_chosen.name: experts.num_chosen,
            self.width.name: experts.expert.width,
            **self.write_router(experts.router),
        }
        if self.activation is None:
            data["hidden_act"] = activation_name(stack)
        if not isinstance(self.renormalized, bool):
            data[self.renormalized[0]] = experts.router.renormalize_epsilon is not None
        if self.shared_width is not None:
            data[self.shared_width.name] = require_type(FeedForward, experts.shared).width
        if self.shared_count is not None:
            data[self.shared_count.name] = require_type(FeedForward, experts.shared).width // experts.expert.width
        if self.clamp is not None and experts.expert.clamp is not None:
            data[self.clamp[0]] = experts.expert.clamp.limit
        if self.write_sparse_layers is not None:
            # transformers needs `intermediate_size` even if no layer is dense
            data["intermediate_size"] = (dense or experts.expert).width
            data |= self.write_sparse_layers([isinstance(layer.feed_forward, Experts) for layer in stack.layers])
        return data

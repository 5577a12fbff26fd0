"""Configs of the feed-forward layers: one dense layer, or a mixture of experts with a router (book C1).

Experts(num_experts=8, num_chosen=2, expert=FeedForward(width=64, activation="silu"), router=Router(score="softmax"))
"""

from dataclasses import dataclass
from typing import Literal

from clearhead.config import CheckedConfig
from clearhead.errors import require

Activation = Literal["relu", "relu_squared", "gelu", "gelu_tanh", "gelu_quick", "silu", "tanh", "xielu"]


@dataclass(frozen=True, kw_only=True)
class GateClamp(CheckedConfig):
    """down(activation(min(gate(x), limit)) · (clamp(up(x), ± limit) + up_offset)) (gpt-oss)."""

    MAY_BE_ZERO = ("up_offset",)

    limit: float
    up_offset: float = 1.0


@dataclass(frozen=True, kw_only=True)
class FeedForward(CheckedConfig):
    """down(activation(up(x))), or down(activation(gate(x)) · up(x)) if gated (book C1)."""

    width: int
    activation: Activation
    gated: bool = False
    bias: bool = False
    clamp: GateClamp | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.gated or self.clamp is None, "a FeedForward without a gate has no clamp; set clamp to None")
        require(
            not self.gated or self.activation != "xielu",
            "xielu has learned parameters of its own and takes no gate; set gated to false",
        )


@dataclass(frozen=True, kw_only=True)
class ExpertGroups(CheckedConfig):
    """Restrict the choice to the experts of the `num_kept` best of `num_groups` groups (DeepSeek)."""

    num_groups: int
    num_kept: int
    scored_by: Literal["max", "top2_sum"]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.num_kept <= self.num_groups,
            f"ExpertGroups.num_kept is {self.num_kept}; it must be at most num_groups {self.num_groups}",
        )


@dataclass(frozen=True, kw_only=True)
class Router(CheckedConfig):
    """How experts are scored, how the best are chosen, and how their outputs are weighted."""

    MAY_BE_ZERO = ("renormalize_epsilon",)

    score: Literal["softmax", "sigmoid"]
    softcap: float | None = None
    selection_bias: bool = False  # added to the scores for the choice only, never for the weights (DeepSeek-V3)
    groups: ExpertGroups | None = None
    renormalize_epsilon: float | None = None  # weights / (their sum + epsilon); None: no renormalization
    scale: float = 1.0
    weighs: Literal["output", "input"] = "output"  # Llama 4 multiplies the expert's input
    bias: bool = False  # on the logits (gpt-oss)


@dataclass(frozen=True, kw_only=True)
class Experts(CheckedConfig):
    """Mixture of experts: each token passes through `num_chosen` of `num_experts` experts and through `shared`."""

    num_experts: int
    num_chosen: int
    expert: FeedForward
    router: Router
    shared: FeedForward | None = None
    shared_gate: bool = False  # multiply the shared expert by sigmoid(w · x) (Qwen2-MoE)
    divisor: float = 1.0  # divides the sum of the chosen and shared experts (√2 in Grok 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.num_chosen <= self.num_experts,
            f"num_chosen is {self.num_chosen}; it must be at most num_experts {self.num_experts}",
        )
        require(
            self.expert.activation != "xielu",
            "xielu has learned parameters of its own, which experts do not have; use another activation",
        )
        require(
            self.shared is not None or not self.shared_gate,
            "shared_gate multiplies a shared expert; set it to false, or give `shared`",
        )
        if self.router.groups is not None:
            self.check_groups(self.router.groups)

    def check_groups(self, groups: ExpertGroups) -> None:
        """Raise ClearheadError if the experts cannot be grouped and chosen like this."""
        require(
            self.num_experts % groups.num_groups == 0,
            f"num_experts is {self.num_experts}; it must be a multiple of num_groups {groups.num_groups}",
        )
        group_size = self.num_experts // groups.num_groups
        require(
            groups.scored_by == "max" or group_size >= 2,
            f"groups scored by 'top2_sum' need at least 2 experts each, not {group_size}",
        )
        num_eligible = groups.num_kept * group_size
        require(
            self.num_chosen <= num_eligible,
            f"num_chosen is {self.num_chosen}; it must be at most {num_eligible}, the experts in the kept groups",
        )

"""The other branch of a block as data: one feed-forward, or a router and many (book C1).

Experts(num_experts=8, num_chosen=2, expert=FeedForward(width=64, activation="silu"), router=Router(score="softmax"))
"""

from dataclasses import dataclass
from typing import Literal

from clearhead.config import Checked
from clearhead.errors import require

Activation = Literal["relu", "gelu", "gelu_tanh", "gelu_quick", "silu", "tanh"]


@dataclass(frozen=True, kw_only=True)
class FeedForward(Checked):
    """down(act(up x)), or down(act(gate x) · up x) where gated. Book C1."""

    width: int
    activation: Activation
    gated: bool = False
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertGroups(Checked):
    """Choose only among the experts of the `num_kept` best of `num_groups` groups (DeepSeek)."""

    num_groups: int
    num_kept: int
    scored_by: Literal["max", "top2_sum"]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_kept <= self.num_groups, f"ExpertGroups keeps {self.num_kept} of {self.num_groups} groups")


@dataclass(frozen=True, kw_only=True)
class Router(Checked):
    """Scores for all experts, the best few chosen, their weights."""

    MAY_BE_ZERO = ("renormalize_epsilon",)

    score: Literal["softmax", "sigmoid"]
    softcap: float | None = None
    selection_bias: bool = False  # added for the choice only, never to the weights (DeepSeek-V3)
    groups: ExpertGroups | None = None
    renormalize_epsilon: float | None = None  # weights / (their sum + epsilon); None: left as they are
    scale: float = 1.0
    weighs: Literal["output", "input"] = "output"  # Llama 4 multiplies the expert's input


@dataclass(frozen=True, kw_only=True)
class Experts(Checked):
    """Mixture of experts: each token goes through `num_chosen` of `num_experts`, and `shared` always."""

    num_experts: int
    num_chosen: int
    expert: FeedForward
    router: Router
    shared: FeedForward | None = None
    divisor: float = 1.0  # of the sum of chosen and shared (√2 in Grok 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_chosen <= self.num_experts, f"num_chosen is {self.num_chosen} of {self.num_experts} experts")
        require(not self.expert.bias, "experts have no bias here; set expert.bias to false")
        groups = self.router.groups
        if groups is not None:
            require(
                self.num_experts % groups.num_groups == 0,
                f"{self.num_experts} experts do not divide into {groups.num_groups} groups",
            )
            require(
                groups.scored_by == "max" or self.num_experts >= 2 * groups.num_groups,
                "groups scored by their two best experts need two experts each",
            )
            require(
                self.num_chosen <= groups.num_kept * (self.num_experts // groups.num_groups),
                f"the kept groups hold fewer than num_chosen {self.num_chosen} experts",
            )

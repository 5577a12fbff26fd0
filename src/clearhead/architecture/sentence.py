"""Configs of sentence embeddings: how the hidden states of a text become one vector.

    SentenceConfig(pooling=Pooling(modes=("cls",)), steps=(Normalize(),))

They describe the modules that follow the network in a folder of the sentence-transformers library. model/sentence.py
computes them.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from clearhead.config import CheckedConfig
from clearhead.errors import require, unknown_name

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last"]


@dataclass(frozen=True, kw_only=True)
class Pooling(CheckedConfig):
    """Hidden states to one vector; the vectors of several modes are concatenated in their order.

    cls: the first token. max, mean: of each entry over all tokens. mean_sqrt_len: the sum divided by the square root of
    the number of tokens. weighted_mean: token t has the weight t. last: the last token.
    """

    modes: tuple[str, ...] = ("mean",)
    include_prompt: bool = True  # False: the tokens of the prompt are left out

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = next((mode for mode in self.modes if mode not in get_args(PoolingMode)), None)
        if unknown is not None:
            raise unknown_name("pooling mode", unknown, get_args(PoolingMode))
        require(len(self.modes) > 0, "pooling needs at least one mode, such as 'mean'")


@dataclass(frozen=True, kw_only=True)
class Projection(CheckedConfig):
    """activation(W x + b)."""

    input_width: int
    width: int
    activation: Literal["identity", "tanh", "relu", "gelu", "silu", "sigmoid"] = "tanh"
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class VectorNorm(CheckedConfig):
    """LayerNorm of the vector."""

    width: int
    epsilon: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class Normalize:
    """Scale the vector to length 1."""


SentenceStep = Projection | VectorNorm | Normalize


@dataclass(frozen=True, kw_only=True)
class SentenceConfig(CheckedConfig):
    """Everything between a text and its vector except the network.

    `prompts` are pairs of a name and the text to put before a text to embed.
    """

    width: int | None = None  # of the hidden states
    pooling: Pooling = Pooling()
    steps: tuple[Projection | VectorNorm | Normalize, ...] = (Normalize(),)
    dimensions: int | None = None  # only the first numbers of each vector are kept (Matryoshka embeddings)
    max_tokens: int | None = None  # longer texts are cut off
    lower_case: bool = False
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None  # name of the prompt of texts for which none is given
    unsupported: str | None = None  # a part of the folder that has no equivalent here; embedding raises an error

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [name for name, _ in self.prompts]
        if self.default_prompt is not None and self.default_prompt not in names:
            raise unknown_name("default prompt", self.default_prompt, names)
        if self.width is None or self.unsupported is not None:
            return
        width = self.width * len(self.pooling.modes)
        for step in self.steps:
            expected = {Projection: "input_width", VectorNorm: "width"}.get(type(step))
            given = getattr(step, expected) if expected else width
            require(
                given == width,
                f"a {type(step).__name__} takes vectors of width {given}, but those before it have {width}",
            )
            width = step.width if isinstance(step, Projection) else width

    def prompt(self, name: str | None) -> str:
        """Return the prompt with this name; None stands for the default, which may be empty."""
        prompts = dict(self.prompts)
        if name is None:
            return prompts.get(self.default_prompt or "", "")
        if name not in prompts:
            raise unknown_name("prompt", name, prompts)
        return prompts[name]

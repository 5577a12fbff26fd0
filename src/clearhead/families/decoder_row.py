"""A decoder-only model type as one row of a table: which settings of config.json it has and what is fixed.

    MIXTRAL = DecoderRow(model_type="mixtral", architecture="MixtralForCausalLM", tensor_names=NAMES)

A field of a row is either fixed (`gated=True`) or a `Setting` of config.json (`tied=Setting("tie_word_embeddings",
False)`). decoder_reading.py turns config.json into our config by a row, decoder_writing.py does the reverse, and
`decoder_family` makes a Family of both.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from clearhead.architecture import LayerNorm, LearnedPositions, RmsNorm, SinusoidalPositions
from clearhead.families.decoder_experts import ExpertRow
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import NameTable

WINDOWED, FULL = "sliding_attention", "full_attention"  # entries of `layer_types`
REQUIRED: Any = object()  # the default of a setting that config.json must have

BranchNorm = RmsNorm | LayerNorm
Placement = Literal["pre", "post", "sandwich", "branch", "parallel", "parallel_norms"]


def _unchanged(value: Any) -> Any:
    """Return the value of a setting that config.json and our config express alike."""
    return value


@dataclass(frozen=True)
class Setting:
    """A value of config.json: its name, what its absence means to transformers, and how it converts to our value.

    A null counts as None, also if the default is another value.
    """

    name: str
    default: Any = REQUIRED
    read: Callable[[Any], Any] = _unchanged
    write: Callable[[Any], Any] = _unchanged
    kind: Literal["integer", "number", "boolean", "value"] | None = None  # its type, if not that of our value


def choice(name: str, default: Any, meanings: Mapping[Any, Any]) -> Setting:
    """Return a setting each of whose values stands for one of ours."""
    values = {meaning: value for value, meaning in meanings.items()}

    def read(value: Any) -> Any:
        return meanings.get(value, value) if isinstance(value, Hashable) else value  # config.json may have a list here

    return Setting(name, default, read, lambda meaning: values.get(meaning))


def gelu_new(name: str) -> Setting:
    """Return the setting of an activation which by default is the tanh form of GELU under its first name.

    The last bit of transformers' result depends on the name.
    """
    default = "gelu_new"
    return Setting(name, default, write=lambda value: default if value == "gelu_pytorch_tanh" else value)


def rms_norm(epsilon: float) -> RmsNorm:
    """Return a plain RMS norm."""
    return RmsNorm(epsilon=epsilon)


def layer_norm(epsilon: float) -> LayerNorm:
    """Return a LayerNorm with weight and bias."""
    return LayerNorm(epsilon=epsilon)


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary positions of a model type: the defaults of its settings and what is fixed."""

    theta: float = 10000.0
    theta_name: str = "rope_theta"  # of the setting outside `rope_parameters`
    pairing: Literal["half", "interleaved"] = "half"
    partial: float | None = None  # default of `partial_rotary_factor`; None: heads are rotated as a whole
    partial_name: str = "partial_rotary_factor"  # of the setting outside `rope_parameters`
    width: Setting | None = None  # GPT-J: the rotated width is a setting, and nothing else is
    by_layer_type: bool = False  # `rope_parameters` has an entry for each layer type (OLMo 3)


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Sliding windows of a model type.

    Without `default_types`, all layers have the window if there is one. Otherwise the layers listed in `layer_types`
    have it, and `default_types` gives the list if config.json does not.
    """

    size: Setting
    default_types: Callable[[Settings, int], list[str]] | None = None
    rotates: Literal["all", "windowed", "windowed_if_any"] = "all"  # which layers have rotary positions


@dataclass(frozen=True, kw_only=True)
class NormedHeads:
    """Norms of queries and keys: `when` they exist, and how they differ from the norms of the layer."""

    when: Setting | bool = True
    norm: Callable[[float], BranchNorm] | None = None  # epsilon -> norm; None: that of the layer
    scope: Literal["shared", "per_head", "joint"] = "shared"
    after_rotation: bool = False


@dataclass(frozen=True, kw_only=True)
class DecoderRow:
    """One model type. The defaults of the fields are those of LLaMA."""

    model_type: str
    architecture: str  # class in transformers
    tensor_names: NameTable
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name -> config.json of a release

    width: Setting = Setting("hidden_size")
    num_layers: Setting = Setting("num_hidden_layers")
    vocab_size: Setting = Setting("vocab_size")
    context: Setting = Setting("max_position_embeddings", 2048)
    epsilon: Setting | float = Setting("rms_norm_eps", 1e-6)
    norm: Callable[[float], BranchNorm] = rms_norm
    has_norm_weights: Setting | bool = True
    placement: Setting | Placement = "pre"
    has_final_norm: Setting | bool = True  # without effect in post-norm models, which have none
    branch_scale: Setting | float = 1.0
    embedding_scale: Setting | float = 1.0
    scaled_by_width: Setting | bool = False  # embeddings are multiplied by √width instead
    positions: Callable[[int], LearnedPositions | SinusoidalPositions] | None = None  # context -> positions

    num_heads: Setting = Setting("num_attention_heads")
    num_kv_heads: Setting | None = Setting("num_key_value_heads", None)  # None: as many as heads
    head_width: Setting | None = Setting("head_dim", None)  # None: width / heads
    rotary: Rotary | None = Rotary()
    windows: Windows | None = None
    input_bias: Setting | bool = Setting("attention_bias", False)
    output_bias: Setting | bool = Setting("attention_bias", False)
    score_scale: Setting | None = None  # None: head_width ** -0.5
    softcap: Setting | None = None
    clip: Setting | None = None
    head_norm: NormedHeads | None = None
    sinks: bool = False

    feed_forward: Setting = Setting("intermediate_size")  # absent: four times the width
    activation: Setting = Setting("hidden_act", "silu")
    gated: bool = True
    feed_forward_bias: Setting | bool = False
    experts: ExpertRow | None = None  # instead of the feed-forward above

    tied: Setting = Setting("tie_word_embeddings", False)
    head_bias: bool = False
    head_scale: Setting | float = 1.0
    head_softcap: Setting | None = None

    # Settings that none of the fields reads -> what their absence means, and the values that change nothing
    defaults: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # From an unusual config.json to one that the fields above describe, and back
    prepare: Callable[[Settings], Settings] = _unchanged
    finish: Callable[[dict[str, Any]], dict[str, Any]] = _unchanged

    base_model_prefix: str = "model."
    token_table: str = "model.embed_tokens.weight"
    head_matrix: str = "lm_head.weight"
    ignored_tensors: tuple[str, ...] = ()

    @property
    def settings(self) -> list[Setting]:
        """All settings in the fields of this row."""
        parts = [*vars(self).values(), self.windows and self.windows.size, self.head_norm and self.head_norm.when]
        parts.append(self.rotary and self.rotary.width)
        return [part for part in parts if isinstance(part, Setting)]

"""Rotary settings as transformers writes them: `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

rope = read_rope(settings, context=8192); write_rope(rope)   # -> {"rope_type": …, "rope_theta": …}
"""

import math
from typing import Any

from clearhead.architecture import DynamicScaling, LinearScaling, Llama3Scaling, Rope, YarnScaling
from clearhead.errors import unknown_name
from clearhead.families.settings import Settings

Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | None


def read_rope(settings: Settings, context: int, theta: float = 10000.0, **options: Any) -> Rope:
    """`options` go to Rope (width, pairing); `theta` is the class default of the family at hand."""
    parameters = rope_parameters(settings)
    theta = parameters.number("rope_theta", settings.number("rope_theta", theta))
    return Rope(theta=theta, scaling=read_scaling(parameters, context), **options)


def rope_parameters(settings: Settings) -> Settings:
    """Of two that say the same, transformers takes the older words, and a length beside the table before one in it."""
    older = settings.table("rope_scaling")
    table = older if older.data else settings.table("rope_parameters")
    length = "original_max_position_embeddings"
    return Settings({**table.data, **({length: settings.data[length]} if length in settings else {})}, table.where)


def read_scaling(parameters: Settings, context: int) -> Scaling:
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    original = parameters.whole("original_max_position_embeddings", context)
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=parameters.number("factor"))
        case "dynamic":
            return DynamicScaling(factor=parameters.number("factor"), original_context=context)
        case "llama3":
            return Llama3Scaling(
                factor=parameters.number("factor"),
                low_frequency_factor=parameters.number("low_freq_factor"),
                high_frequency_factor=parameters.number("high_freq_factor"),
                original_context=original,
            )
        case "yarn":
            return YarnScaling(
                factor=yarn_factor(parameters, context),
                original_context=original,
                attention_factor=yarn_attention_factor(parameters, context),
                beta_fast=parameters.number("beta_fast", 32.0),
                beta_slow=parameters.number("beta_slow", 1.0),
                truncate=parameters.flag("truncate", True),
            )
    raise unknown_name(f"rope_type in {parameters.where}:", kind, ("default", "linear", "dynamic", "llama3", "yarn"))


def yarn_factor(parameters: Settings, context: int) -> float:
    original = parameters.whole("original_max_position_embeddings", context, at_least=1)
    return parameters.number("factor", context / original)


def yarn_attention_factor(parameters: Settings, context: int) -> float:
    """Given; else the ratio of two magnitudes where both are named (DeepSeek); else 0.1·ln(factor) + 1."""
    if "attention_factor" in parameters:
        return parameters.number("attention_factor")
    factor = yarn_factor(parameters, context)
    above, below = parameters.number("mscale", 0.0), parameters.number("mscale_all_dim", 0.0)
    if above and below:
        return yarn_magnitude(factor, above) / yarn_magnitude(factor, below)
    return yarn_magnitude(factor, 1.0)


def yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def write_rope(rope: Rope) -> dict[str, Any]:
    return {"rope_theta": rope.theta} | write_scaling(rope.scaling)


def write_scaling(scaling: Scaling) -> dict[str, Any]:
    match scaling:
        case None:
            return {"rope_type": "default"}
        case LinearScaling(factor=factor):
            return {"rope_type": "linear", "factor": factor}
        case DynamicScaling(factor=factor):
            return {"rope_type": "dynamic", "factor": factor}
        case Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_frequency_factor,
                "high_freq_factor": scaling.high_frequency_factor,
                "original_max_position_embeddings": scaling.original_context,
            }
        case YarnScaling():
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_context,
                "attention_factor": scaling.attention_factor,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "truncate": scaling.truncate,
            }

"""Read and write rotary settings: `rope_parameters`, or the older pair `rope_theta` and `rope_scaling`.

rope = read_rope(settings, context=8192); write_rope(rope)   # -> {"rope_type": …, "rope_theta": …}
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from clearhead.architecture import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    Scaling,
    YarnScaling,
)
from clearhead.errors import ClearheadError, require, unknown_name
from clearhead.families.settings import Settings


def read_rope(settings: Settings, context: int, theta: float = 10000.0, **options: Any) -> Rope:
    """Return the rotary positions; `theta` is the default of the model type, `options` go to Rope (width, pairing).

    Without a width in `options`, the model type rotates heads as a whole.
    """
    parameters = rope_parameters(settings)
    if "width" not in options:
        for source in (settings, parameters):
            source.allow_only("partial_rotary_factor", 1.0)
    theta = parameters.number("rope_theta", settings.number("rope_theta", theta))
    return Rope(theta=theta, scaling=read_scaling(parameters, context), **options)


def rope_parameters(settings: Settings) -> Settings:
    """Return the object that holds the rotary settings, with the precedence that transformers gives them.

    `rope_scaling` precedes `rope_parameters`; an original length at the top level precedes one inside the object.
    """
    older = settings.object("rope_scaling")
    rope_settings = older if older.data else settings.object("rope_parameters")
    length = "original_max_position_embeddings"
    original = {length: settings.data[length]} if length in settings else {}
    return Settings({**rope_settings.data, **original}, rope_settings.where)


def rope_parameters_of_type(settings: Settings, layer_type: str, *, merge_scaling: bool) -> Settings:
    """Return the object that holds the rotary settings of one layer type, if each type has its own.

    With `merge_scaling`, those of an older file's `rope_scaling` come first; its `type` counts only without a
    `rope_type`, which there always is. transformers reads `truncate` beside the types and not in them; no release has
    it in either place.
    """
    by_type = settings.object("rope_parameters")
    parameters = by_type.object(layer_type)
    if merge_scaling:
        scaling = settings.object("rope_scaling").data
        parameters = Settings({"rope_type": "default", **parameters.data, **scaling}, parameters.where)
    for source in (by_type, parameters):
        source.allow_only("truncate", True)
    return parameters


def read_scaling(parameters: Settings, context: int) -> Scaling | None:
    """Return the scaling that `rope_type` selects, or None for "default"; raise ClearheadError if it is unknown."""
    rope_type = parameters.string("rope_type", parameters.string("type", "default"))
    original = parameters.integer("original_max_position_embeddings", context)
    match rope_type:
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
                attention_factor=_yarn_attention_factor(parameters, context),
                beta_fast=parameters.number("beta_fast", 32.0),
                beta_slow=parameters.number("beta_slow", 1.0),
                truncate=parameters.truth("truncate", True),
            )
        case "longrope":
            return _read_longrope(parameters, original, context)
    known = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
    raise unknown_name(f"rope_type in {parameters.where}:", rope_type, known)


def _read_longrope(parameters: Settings, original: int, context: int) -> LongRopeScaling:
    """Return the scaling of LongRoPE; `factor` only gives the default of `attention_factor`."""
    factors = [parameters.array("short_factor"), parameters.array("long_factor")]
    if not all(factors) or not all(isinstance(factor, int | float) for part in factors for factor in part):
        raise ClearheadError(f"{parameters.where}: 'longrope' needs the lists of numbers short_factor and long_factor")
    factor = parameters.number("factor", context / max(original, 1))
    magnitude = 1.0 if factor <= 1 or original <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (tuple(float(factor) for factor in part) for part in factors)
    return LongRopeScaling(
        short_factors=short,
        long_factors=long,
        original_context=original,
        attention_factor=parameters.number("attention_factor", magnitude),
    )


def yarn_factor(parameters: Settings, context: int) -> float:
    """Return `factor`; if it is absent, the ratio of the context to the original context."""
    original = parameters.integer("original_max_position_embeddings", context, at_least=1)
    return parameters.number("factor", context / original)


def _yarn_attention_factor(parameters: Settings, context: int) -> float:
    """Return `attention_factor` if present, else the ratio of two magnitudes (DeepSeek), else 0.1·ln(factor) + 1."""
    if "attention_factor" in parameters:
        return parameters.number("attention_factor")
    factor = yarn_factor(parameters, context)
    mscale, mscale_all_dim = parameters.number("mscale", 0.0), parameters.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        divisor = _yarn_magnitude(factor, mscale_all_dim)
        require(divisor > 0, f"{parameters.where}: 'mscale_all_dim' is {mscale_all_dim}; it must be positive")
        return _yarn_magnitude(factor, mscale) / divisor
    return _yarn_magnitude(factor, 1.0)


def _yarn_magnitude(factor: float, mscale: float) -> float:
    """Return 0.1 · mscale · ln(factor) + 1, or 1 if the factor does not extend the context."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def yarn_score_scale(width: int, factor: float, mscale: float) -> float:
    """Return width^-1/2 · magnitude², by which DeepSeek multiplies attention scores."""
    magnitude = _yarn_magnitude(factor, mscale)
    return width**-0.5 * magnitude * magnitude


def recover_mscale(scale: float, width: int, factor: float) -> float | None:
    """Return the shortest decimal mscale for which `yarn_score_scale` gives exactly `scale`; None if there is none."""
    if scale > 0 and factor > 1:
        for mscale in _candidate_mscales(math.sqrt(scale * math.sqrt(width)), factor):
            if yarn_score_scale(width, factor, mscale) == scale:
                return mscale
    return None


def _candidate_mscales(magnitude: float, factor: float) -> Iterator[float]:
    """Yield solutions of `_yarn_magnitude` for mscale: rounded to more and more digits, then varied by a few ulps."""
    unit = 0.1 * math.log(factor)
    yield from (round((magnitude - 1) / unit, digits) for digits in range(1, 16))
    for magnitude_ulps, mscale_ulps in product(range(-4, 5), repeat=2):
        mscale = (magnitude + magnitude_ulps * math.ulp(magnitude) - 1) / unit
        yield mscale + mscale_ulps * math.ulp(mscale)


def write_rope(rope: Rope) -> dict[str, Any]:
    """Return `rope_parameters`."""
    return {"rope_theta": rope.theta} | _write_scaling(rope.scaling)


def _write_scaling(scaling: Scaling | None) -> dict[str, Any]:
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
        case LongRopeScaling():
            return {
                "rope_type": "longrope",
                "short_factor": list(scaling.short_factors),
                "long_factor": list(scaling.long_factors),
                "original_max_position_embeddings": scaling.original_context,
                "attention_factor": scaling.attention_factor,
            }

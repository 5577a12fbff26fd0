"""Random configs for property tests, generated from the type hints alone.

@SLOW_SETTINGS
@given(CONFIGS)
def test_something(config): ...
"""

from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import HealthCheck, reject, settings
from hypothesis import strategies as st

from clearhead.architecture import ModelConfig
from clearhead.errors import ClearheadError


@st.composite
def valid_configs(draw: st.DrawFn, config: type) -> Any:
    """Draw a config of this class that passes its own validation."""
    strategies = strategies_by_field(config)
    for _ in range(20):
        values = {name: draw(strategy) for name, strategy in strategies.items()}
        try:
            return config(**values)
        except ClearheadError:
            continue
    return reject()


@cache  # hypothesis checks a strategy once, so a new one for every draw would take most of the time
def strategies_by_field(config: type) -> dict[str, st.SearchStrategy[Any]]:
    hints = get_type_hints(config)
    return {item.name: field_values(hints[item.name], item.name) for item in fields(config)}


def field_values(hint: Any, name: str) -> st.SearchStrategy[Any]:
    """Return the values of a field: small even numbers, so that heads divide evenly. There is no cross-attention."""
    if name in ("cross_attention", "encoder", "share_embeddings"):
        return st.just(False if hint is bool else None)
    if get_origin(hint) is tuple and get_args(hint)[0] is float:  # factors of LongRoPE, for heads of width 4
        return st.tuples(st.floats(0.5, 2.0), st.floats(0.5, 2.0))
    if get_origin(hint) is tuple:
        return st.lists(valid_configs(get_args(hint)[0]), min_size=1, max_size=3).map(tuple)
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    options = get_args(hint) or (hint,)
    return st.one_of([option_values(option, name) for option in options])


def option_values(option: Any, name: str) -> st.SearchStrategy[Any]:
    """Return the values of one type among those that a field admits."""
    if option is type(None):
        return st.none()
    if is_dataclass(option):
        return valid_configs(option)
    if option is bool:
        return st.booleans()
    if option is int:
        return st.sampled_from([2, 4, 8]) if name != "max_distance" else st.just(128)
    return st.floats(1.5, 1e6) if name == "theta" else st.floats(1e-3, 0.9)


CONFIGS = valid_configs(ModelConfig)
SLOW_SETTINGS = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)

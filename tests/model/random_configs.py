"""Random configs for property tests, built from the type hints alone.

@SLOWLY
@given(CONFIGS)
def test_something(config): ...
"""

from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import HealthCheck, reject, settings
from hypothesis import strategies as st

from clearhead.architecture import ModelConfig
from clearhead.errors import ClearheadError


@st.composite
def built(draw: st.DrawFn, part: type) -> Any:
    """Any config of this type that passes its own checks."""
    hints = get_type_hints(part)
    for _ in range(20):
        values = {item.name: draw(values_of(hints[item.name], item.name)) for item in fields(part)}
        try:
            return part(**values)
        except ClearheadError:
            continue
    return reject()


def values_of(hint: Any, name: str) -> st.SearchStrategy[Any]:
    """Even small numbers, so that heads divide and pairs pair; cross-attention is for `translator` to have."""
    if name in ("cross_attention", "encoder", "share_embeddings"):
        return st.just(False if hint is bool else None)
    if get_origin(hint) is tuple:
        return st.lists(built(get_args(hint)[0]), min_size=1, max_size=3).map(tuple)
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    options = get_args(hint) or (hint,)
    return st.one_of([value_of(option, name) for option in options])


def value_of(option: Any, name: str) -> st.SearchStrategy[Any]:
    if option is type(None):
        return st.none()
    if is_dataclass(option):
        return built(option)
    if option is bool:
        return st.booleans()
    if option is int:
        return st.sampled_from([2, 4, 8]) if name != "max_distance" else st.just(128)
    return st.floats(1.5, 1e6) if name == "theta" else st.floats(1e-3, 0.9)


CONFIGS = built(ModelConfig)
SLOWLY = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)

"""Options are checked when they are created: an invalid value raises one sentence that names it."""

import math
import subprocess
import sys

import pytest

from clearhead.errors import ClearheadError
from clearhead.options import SamplingOptions, check_names, check_temperature_is_set

INVALID = [
    ({"max_new_tokens": -1}, "max_new_tokens is -1"),
    ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0"),
    ({"max_new_tokens": None}, "max_new_tokens is None"),
    ({"min_new_tokens": -1}, "min_new_tokens is -1"),
    ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9; it must not exceed max_new_tokens, 8"),
    ({"temperature": -1}, "temperature is -1"),
    ({"temperature": 1e-9}, "temperature is 1e-09; it must be 0 for the most likely token"),
    ({"temperature": math.nan}, "temperature is nan"),
    ({"temperature": math.inf}, "temperature is inf"),
    ({"temperature": False}, "temperature is False"),
    ({"temperature": "hot"}, "temperature is 'hot'"),
    ({"temperature": None}, "temperature is None"),
    ({"top_k": 0}, "top_k is 0; it must be a whole number, 1 or more; without it every token is kept"),
    ({"top_k": True}, "top_k is True"),
    ({"top_p": 0}, "top_p is 0; it must be greater than 0 and at most 1"),
    ({"top_p": 1.1}, "top_p is 1.1"),
    ({"min_p": -0.1}, "min_p is -0.1"),
    ({"min_p": 2}, "min_p is 2"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ({"presence_penalty": math.inf}, "presence_penalty is inf"),
    ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
    ({"seed": 2**63}, "seed is 9223372036854775808"),
    ({"seed": 1.5}, "seed is 1.5"),
    ({"logprobs": -1}, "logprobs is -1"),
    ({"logprobs": True}, "logprobs is True"),
    ({"stop": [""]}, "stop contains ''"),
    ({"stop": ["a", 7]}, "stop contains 7"),
    ({"stop": 7}, "stop is 7; it must be a list"),
    ({"stop_ids": [-1]}, "stop_ids contains -1"),
    ({"stop_ids": 2}, "stop_ids is 2; it must be a list"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias contains -1"),
    ({"logit_bias": {"7": 1.0}}, "logit_bias contains '7'"),
    ({"logit_bias": {7: math.inf}}, "logit_bias contains .7, inf."),
    ({"logit_bias": [7]}, "logit_bias contains 7; give token ids, each with a bias"),
    ({"logit_bias": [(7, 1.0), (7, 2.0)]}, "logit_bias contains a token twice"),
]


@pytest.mark.parametrize(("values", "message"), INVALID, ids=[message for _, message in INVALID])
def test_an_invalid_value_raises_with_its_name(values, message):
    with pytest.raises(ClearheadError, match=message):
        SamplingOptions(**values)


def test_an_unknown_field_raises_type_error():
    with pytest.raises(TypeError, match="typical_p"):
        SamplingOptions(typical_p=0.9)


def test_the_limits_of_each_range_are_valid():
    SamplingOptions(max_new_tokens=0, temperature=1e-6, top_k=1, top_p=5e-324, min_p=1, logprobs=0, seed=-(2**63))
    SamplingOptions(max_new_tokens=5, min_new_tokens=5, temperature=1e9, top_p=1, min_p=0, seed=2**63 - 1)


def test_lists_are_stored_as_tuples():
    options = SamplingOptions(logit_bias={3: -1, 2: 0.5}, stop=["a", "b"], stop_ids={9})
    assert options.logit_bias == ((3, -1), (2, 0.5))
    assert options.stop == ("a", "b")
    assert options.stop_ids == (9,)
    assert SamplingOptions(stop="END").stop == ("END",)
    assert SamplingOptions(logit_bias=[[3, -1], (2, 0.5)], stop=iter("ab"), stop_ids=[9]) == options
    assert hash(options) == hash(SamplingOptions(logit_bias=options.logit_bias, stop=("a", "b"), stop_ids=(9,)))


def test_with_seed_keeps_a_seed_or_adds_a_random_one():
    assert SamplingOptions(seed=0).with_seed() == SamplingOptions(seed=0)
    random_seeds = {SamplingOptions().with_seed().seed for _ in range(100)}
    assert len(random_seeds) == 100
    assert None not in random_seeds


def test_check_names_rejects_unknown_options_and_those_without_effect():
    check_names({"temperature": 1.0, "stop": "x"}, beams=False)
    check_names({"length_penalty": 1.0, "stop_ids": [1]}, beams=True)
    with pytest.raises(ClearheadError, match="unknown option of generate: 'tempratur'; did you mean 'temperature'"):
        check_names({"tempratur": 1.0}, beams=False)
    with pytest.raises(ClearheadError, match="did you mean 'beams'"):
        check_names({"beam": 2}, beams=False)
    with pytest.raises(ClearheadError, match="temperature has no effect with beams; leave it out"):
        check_names({"temperature": 1.0}, beams=True)
    with pytest.raises(ClearheadError, match="length_penalty has no effect without beams; leave it out"):
        check_names({"length_penalty": 1.0}, beams=False)


def test_options_of_sampling_need_a_temperature():
    check_temperature_is_set({"temperature": 0.5, "top_p": 0.9, "seed": 1}, n=3)
    check_temperature_is_set({"max_new_tokens": 5, "top_p": None})
    for name in ("top_k", "top_p", "min_p", "seed"):
        with pytest.raises(ClearheadError, match=f"{name} has no effect at temperature 0"):
            check_temperature_is_set({name: 1})
    with pytest.raises(ClearheadError, match="n is 2, but at temperature 0 all texts would be the same"):
        check_temperature_is_set({}, n=2)


WITHOUT_PACKAGE = """
import importlib, pathlib, sys, types
import clearhead
package, _, module = sys.argv[1].rpartition(".")
if package:  # a package without its __init__, which imports its other modules
    stub = types.ModuleType(f"clearhead.{package}")
    stub.__path__ = [str(pathlib.Path(clearhead.__file__).parent / package)]
    sys.modules[stub.__name__] = stub
importlib.import_module(f"clearhead.{sys.argv[1]}")
sys.exit("torch" in sys.modules)
"""


@pytest.mark.parametrize("module", ["options", "generation.stop_strings", "cache.page_pool"])
def test_modules_that_need_no_tensors_do_not_import_torch(module):
    assert subprocess.run([sys.executable, "-c", WITHOUT_PACKAGE, module], check=False).returncode == 0

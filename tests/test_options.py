"""Options are checked at birth: each wrong value gives one sentence that names it."""

import math
import subprocess
import sys

import pytest

from clearhead.errors import ClearheadError
from clearhead.options import SamplingOptions

WRONG = [
    ({"max_new_tokens": -1}, "max_new_tokens is -1"),
    ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0"),
    ({"max_new_tokens": None}, "max_new_tokens is None"),
    ({"min_new_tokens": -1}, "min_new_tokens is -1"),
    ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9; it must not exceed max_new_tokens, 8"),
    ({"temperature": -1}, "temperature is -1"),
    ({"temperature": 1e-9}, "temperature is 1e-09; it must be 0 for the likeliest token"),
    ({"temperature": math.nan}, "temperature is nan"),
    ({"temperature": math.inf}, "temperature is inf"),
    ({"temperature": False}, "temperature is False"),
    ({"temperature": "hot"}, "temperature is 'hot'"),
    ({"temperature": None}, "temperature is None"),
    ({"top_k": 0}, "top_k is 0; it must be a whole number, 1 or more; left out, every token is kept"),
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
    ({"stop": [""]}, "stop has ''"),
    ({"stop": ["a", 7]}, "stop has 7"),
    ({"stop": 7}, "stop is 7; it must be a list"),
    ({"stop_ids": [-1]}, "stop_ids has -1"),
    ({"stop_ids": 2}, "stop_ids is 2; it must be a list"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias has -1"),
    ({"logit_bias": {"7": 1.0}}, "logit_bias has '7'"),
    ({"logit_bias": {7: math.inf}}, "logit_bias has .7, inf."),
    ({"logit_bias": [7]}, "logit_bias has 7; give token ids, each with a bias"),
    ({"logit_bias": [(7, 1.0), (7, 2.0)]}, "logit_bias names a token twice"),
]


@pytest.mark.parametrize(("values", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
def test_a_wrong_value_is_named(values, sentence):
    with pytest.raises(ClearheadError, match=sentence):
        SamplingOptions(**values)


def test_an_unknown_option_is_no_option():
    with pytest.raises(TypeError, match="typical_p"):
        SamplingOptions(typical_p=0.9)


def test_edges_are_allowed():
    SamplingOptions(max_new_tokens=0, temperature=1e-6, top_k=1, top_p=5e-324, min_p=1, logprobs=0, seed=-(2**63))
    SamplingOptions(max_new_tokens=5, min_new_tokens=5, temperature=1e9, top_p=1, min_p=0, seed=2**63 - 1)


def test_lists_are_kept_as_tuples():
    options = SamplingOptions(logit_bias={3: -1, 2: 0.5}, stop=["a", "b"], stop_ids={9})
    assert options.logit_bias == ((3, -1), (2, 0.5))
    assert options.stop == ("a", "b")
    assert options.stop_ids == (9,)
    assert SamplingOptions(stop="END").stop == ("END",)
    assert SamplingOptions(logit_bias=[[3, -1], (2, 0.5)], stop=iter("ab"), stop_ids=[9]) == options
    assert hash(options) == hash(SamplingOptions(logit_bias=options.logit_bias, stop=("a", "b"), stop_ids=(9,)))


def test_seeded_keeps_a_seed_and_makes_fresh_ones():
    assert SamplingOptions(seed=0).seeded() == SamplingOptions(seed=0)
    fresh = {SamplingOptions().seeded().seed for _ in range(100)}
    assert len(fresh) == 100
    assert None not in fresh


@pytest.mark.parametrize("module", ["generation.options", "generation.stops", "cache.pages"])
def test_bookkeeping_brings_no_torch(module):
    code = f"import sys, clearhead.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

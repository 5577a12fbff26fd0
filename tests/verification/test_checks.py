"""Run every check on toy models of every style and on real models: all that apply must pass."""

import json

import pytest
import torch

import clearhead
from clearhead.api import Model
from clearhead.architecture import GroupedAttention
from clearhead.checkpoint.huggingface import save_folder
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.verification import CheckResult, forward_checks, verify
from clearhead.verification.backend_checks import int8_weights
from clearhead.verification.case import VerificationCase
from clearhead.verification.checks import CHECKS
from clearhead.verification.results import LogitComparison, run_check
from tests.checkpoint.tiny import tiny_config
from tests.model.toys import toy
from tests.toy_presets import shrink
from tests.verification.models import STYLES, kernels_available, toy_model

USUALLY_SKIPPED = {
    "torch.compile == eager",
    "absorbed latent attention == unfolded",
    "precomputed cross-attention == computed",
}
WINDOWED = {"mistral", "gemma3", "llama4", "gpt3"}
NOT_IN_TRANSFORMERS = {"gopher", "gpt3"}
NOT_IN_KERNELS = {"gopher"}
KERNELS = "C++ kernels == PyTorch modules"
ENCODER_CHECKS = {
    "batch == single sequence",
    "left padding == no padding",
    "right padding == no padding",
    "fused attention == reference attention",
    "8-bit weights ~ full weights",
    "4-bit weights ~ full weights",
    "Clearhead == transformers",
}


def expected_skips(style):
    """Return the checks that do not apply to a style."""
    if style == "bert":
        return CHECKS.keys() - ENCODER_CHECKS
    skipped = set(USUALLY_SKIPPED)
    if style not in WINDOWED:
        skipped |= {"sliding-window cache == full forward"}
    if style in NOT_IN_TRANSFORMERS:
        skipped |= {"Clearhead == transformers"}
    if style in NOT_IN_KERNELS or not kernels_available():
        skipped |= {KERNELS}
    return skipped - {
        "deepseek": {"absorbed latent attention == unfolded"},
        "t5": {"precomputed cross-attention == computed"},
        "bart": {"precomputed cross-attention == computed"},
    }.get(style, set())


def details_by_check(results, verdict):
    """Return the details of the checks with a verdict."""
    return {result.check: result.detail for result in results if result.verdict == verdict}


@pytest.mark.parametrize("style", STYLES)
def test_all_checks_pass_for_every_style(style):
    results = list(verify(toy_model(style), num_new_tokens=24))
    assert details_by_check(results, "fail") == {}
    assert details_by_check(results, "skipped").keys() == expected_skips(style)


def test_a_format_for_which_transformers_lacks_a_package_is_skipped(tmp_path, monkeypatch):
    network = clearhead.create("llama-3.2-1b", tiny=True).network
    save_folder(network, tmp_path)

    def from_pretrained(*arguments, **options):
        raise ImportError("Loading a GPTQ quantized model requires optimum (`pip install optimum`)\nmore")

    monkeypatch.setattr("transformers.LlamaForCausalLM.from_pretrained", from_pretrained)
    results = list(verify(clearhead.load(tmp_path, fast=False), num_new_tokens=4))
    assert details_by_check(results, "fail") == {}
    reason = details_by_check(results, "skipped")["Clearhead == transformers"]
    assert reason == "transformers says: Loading a GPTQ quantized model requires optimum (`pip install optimum`)"


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("t5-small", "text among others == text alone"),  # logits of 0.01, whose rounding errors vanish
        ("electra-small", "Clearhead == transformers"),  # one logit per token, in an axis that transformers drops
    ],
)
def test_a_toy_preset_passes(name, check):
    results = list(verify(clearhead.create(name, tiny=True), num_new_tokens=4))
    assert details_by_check(results, "fail") == {}
    assert check in details_by_check(results, "pass")


@pytest.mark.parametrize("style", ["llama", "gemma3", "llama4", "deepseek", "t5"])
def test_differences_vanish_in_float64(style):
    results = list(verify(toy_model(style, torch.float64), num_new_tokens=8))
    assert details_by_check(results, "fail") == {}
    assert details_by_check(results, "skipped")[KERNELS].startswith("the C++ kernels cannot run this model")
    exact = [result.difference or 0 for result in results if " == " in result.check]
    assert max(exact) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("style", ["mistral", "gemma3", "llama4", "deepseek", "t5"])
def test_256_greedy_tokens_are_equal(style):
    details = details_by_check(verify(toy_model(style)), "pass")
    assert details["greedy decoding == full forward"] == "256 of 256 tokens equal"
    assert details["speculative decoding == greedy decoding"].startswith("256 of 256 tokens equal")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_compiled_network_equals_eager():
    case = VerificationCase.create(toy_model("gpt2"), compiles=True)
    assert run_check("compiled", CHECKS["torch.compile == eager"], case).verdict == "pass"


@pytest.mark.download
def test_all_checks_pass_for_stories15m(stories15m):
    results = list(verify(clearhead.load(stories15m), length=40, num_new_tokens=24))
    assert details_by_check(results, "fail") == {}
    assert details_by_check(results, "skipped").keys() == expected_skips("llama")


@pytest.mark.download
@pytest.mark.slow
@pytest.mark.parametrize("name", ["stories15m", "smollm2_gguf"])
def test_all_checks_pass_for_real_models_over_256_tokens(name, request):
    results = list(verify(clearhead.load(request.getfixturevalue(name), dtype="float32")))
    assert details_by_check(results, "fail") == {}
    assert details_by_check(results, "pass")["greedy decoding == full forward"] == "256 of 256 tokens equal"


# --- sequences


def test_sequences_exceed_windows_up_to_a_limit():
    assert len(VerificationCase.create(toy_model("mistral")).sequences[0]) == 96
    assert len(VerificationCase.create(Model(windowed(300).network)).sequences[0]) > 300
    wide = VerificationCase.create(windowed(4096))
    assert len(wide.sequences[0]) == 96
    result = run_check("sliding", CHECKS["sliding-window cache == full forward"], wide)
    assert (result.verdict, result.difference) == ("skipped", None)
    assert result.detail == "96 tokens do not exceed the window of 4096; increase --length"


def windowed(size):
    return clearhead.create(tiny_config(window=size, num_layers=1))


def test_learned_positions_limit_the_number_of_new_tokens():
    case = VerificationCase.create(toy_model("gpt2"), length=192)
    assert case.num_new_tokens == 1
    assert all(result.verdict != "fail" for result in verify(toy_model("gpt2"), length=192))
    assert VerificationCase.create(toy_model("gpt2")).num_new_tokens == 97


@pytest.mark.parametrize(
    ("style", "options", "message"),
    [
        ("gpt2", {"length": 193}, "length is 193; for this model it must be from 24 to 192"),
        ("llama", {"length": 3}, "length is 3; for this model it must be at least 24"),
        ("llama", {"num_new_tokens": 0}, "the number of new tokens is 0; it must be at least 1"),
    ],
)
def test_wrong_lengths_raise(style, options, message):
    with pytest.raises(ClearheadError, match=message):
        verify(toy_model(style), **options)


def test_with_a_tokenizer_the_sequences_are_parts_of_a_text(model_with_tokenizer):
    case = VerificationCase.create(model_with_tokenizer)
    assert model_with_tokenizer.tokenizer.decode(case.sequences[0]).startswith("A letter posted in the morning")
    assert [len(sequence) for sequence in case.sequences] == [96, 61, 23]


@pytest.fixture
def model_with_tokenizer():
    from clearhead.cli.demo import random_model

    return random_model()


# --- verdicts


def result_of(actual, expected):
    """Return the result of a check that compares two lists of logits."""
    comparison = LogitComparison([(torch.tensor(actual), torch.tensor(expected))], "detail")
    return run_check("check", lambda case: comparison, VerificationCase.create(toy_model("llama")))


def test_the_tolerance_grows_with_the_largest_logit():
    assert result_of([1.0], [1.0 + 5e-6]).verdict == "pass"
    assert result_of([1.0], [1.0 + 5e-5]).verdict == "fail"
    assert result_of([0.0], [5e-5]).verdict == "fail"
    assert result_of([100.0], [100.0 + 5e-4]).verdict == "pass"
    assert result_of([100.0], [100.0]).tolerance == pytest.approx(1e-3)
    assert result_of([2.0, -1e4], [2.0, -1e4]).tolerance == pytest.approx(2e-5)  # an excluded token does not count
    assert result_of([-30.0, -90.0], [-30.0, -90.0]).tolerance == pytest.approx(3e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_never_pass(value):
    for actual, expected in (([value], [0.0]), ([0.0], [value]), ([value], [value])):
        result = result_of(actual, expected)
        assert result.verdict == "fail"
        assert result.as_data()["largest_difference"] is None


def test_a_token_excluded_in_both_is_no_difference():
    excluded = -float("inf")
    assert result_of([[2.0, excluded]], [[2.0, excluded]]).difference == 0.0
    assert result_of([[2.0, excluded]], [[2.0, 1.0]]).verdict == "fail"
    assert result_of([[excluded, excluded]], [[excluded, excluded]]).verdict == "fail"


@pytest.mark.parametrize("bias", [-1e4, -float("inf")])
def test_excluded_tokens_do_not_affect_the_error_of_packed_weights(bias):
    """Marian excludes its padding token in this way."""
    model = toy_model("bart")
    head = model.network.head
    head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
    plain = int8_weights(VerificationCase.create(model))
    with torch.no_grad():
        head.bias[:3] = bias
    excluding = int8_weights(VerificationCase.create(model))
    assert excluding.difference == pytest.approx(plain.difference, rel=0.5)
    assert {result.verdict for result in verify(model, num_new_tokens=8)} <= {"pass", "skipped"}


def test_the_largest_difference_of_all_pairs_counts():
    good, bad = (torch.zeros(2), torch.zeros(2)), (torch.zeros(2), torch.tensor([0.0, float("nan")]))
    for pairs in ([good, bad], [bad, good]):
        result = run_check(
            "check", lambda case, pairs=pairs: LogitComparison(pairs, ""), VerificationCase.create(toy_model("llama"))
        )
        assert result.verdict == "fail"
    assert result_of([0.0, 0.0], [0.0]).verdict == "fail"


def test_an_error_in_a_check_is_a_failure():
    def raise_error(case):
        raise ClearheadError("the cache holds 3 tokens")

    result = run_check("check", raise_error, VerificationCase.create(toy_model("llama")))
    assert result == CheckResult("check", "fail", "ClearheadError: the cache holds 3 tokens")


def test_any_exception_in_a_check_is_a_failure():
    result = run_check("check", lambda case: case.no_such_attribute, VerificationCase.create(toy_model("llama")))
    assert result.verdict == "fail"
    assert result.detail.startswith("AttributeError: ")


def test_without_transformers_the_comparison_is_skipped(monkeypatch):
    monkeypatch.setattr(forward_checks, "find_spec", lambda name: None)
    result = run_check("transformers", forward_checks.transformers, VerificationCase.create(toy_model("llama")))
    assert (result.verdict, result.detail) == ("skipped", "transformers is not installed; pip install transformers")


@pytest.mark.parametrize(("length", "verdict"), [(32, "pass"), (33, "skipped")])
def test_transformers_is_skipped_beyond_its_sinusoidal_positions(length, verdict):
    model = Model(toy(shrink(preset("marian")), torch.float32))
    result = run_check("transformers", forward_checks.transformers, VerificationCase.create(model, length=length))
    assert result.verdict == verdict, result.detail


def test_toy_models_have_the_attention_of_their_style():
    patterns = {style: {layer.attention.pattern for layer in STYLES[style]().decoder.layers} for style in WINDOWED}
    assert {style: len(kinds) for style, kinds in patterns.items()} == {
        "mistral": 1,
        "gemma3": 2,
        "llama4": 2,
        "gpt3": 2,
    }
    assert not any(isinstance(layer.attention, GroupedAttention) for layer in STYLES["deepseek"]().decoder.layers)


def test_a_misread_config_fails_because_transformers_reads_the_own_folder(tmp_path):
    """A folder that Clearhead wrote would contain the same error, so that both would agree."""
    save_folder(toy_model("llama").network, tmp_path)
    model = clearhead.load(tmp_path, fast=False)
    verdicts = []
    for theta in (None, 77.0):
        if theta is not None:  # now the network computes with another setting than config.json has
            data = json.loads((tmp_path / "config.json").read_text())
            data["rope_parameters"]["rope_theta"] = theta
            (tmp_path / "config.json").write_text(json.dumps(data))
        result = run_check("transformers", forward_checks.transformers, VerificationCase.create(model))
        assert "your folder" in result.detail
        verdicts.append(result.verdict)
    assert verdicts == ["pass", "fail"]

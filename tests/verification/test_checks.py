"""Every check on a model of every style, and on real ones: all that apply must pass."""

import pytest
import torch

import clearhead
from clearhead.api import Model
from clearhead.architecture.config import GroupedAttention
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.verification import reading
from clearhead.verification.checks import CHECKS, verify
from clearhead.verification.fast import eight_bits
from clearhead.verification.finding import Comparison, Finding, examine
from clearhead.verification.subject import Subject
from tests.book.shrink import shrink
from tests.checkpoint.tiny import tiny_config
from tests.model.toys import toy
from tests.verification.models import STYLES, kernels_are_here, toy_model

ALWAYS = {"compiled == eager", "absorbed latent == unfolded", "remembered source == read again"}
WINDOWED = {"mistral", "gemma3", "llama4", "gpt3"}
UNKNOWN_TO_TRANSFORMERS = {"gopher", "gpt3"}
UNKNOWN_TO_THE_KERNELS = {"llama4", "deepseek", "bloom", "gopher", "t5"}
KERNELS = "kernel step == network"
OF_ENCODERS = {
    "batched == single",
    "padded left == unpadded",
    "padded right == unpadded",
    "fused attention == reference",
    "8-bit weights ~ full",
    "4-bit weights ~ full",
    "ours == transformers",
}


def not_asked(style):
    """The checks that say nothing about a style."""
    if style == "bert":
        return CHECKS.keys() - OF_ENCODERS
    skipped = set(ALWAYS)
    if style not in WINDOWED:
        skipped |= {"sliding cache == uncached"}
    if style in UNKNOWN_TO_TRANSFORMERS:
        skipped |= {"ours == transformers"}
    if style in UNKNOWN_TO_THE_KERNELS or not kernels_are_here():
        skipped |= {KERNELS}
    return skipped - {
        "deepseek": {"absorbed latent == unfolded"},
        "t5": {"remembered source == read again"},
        "bart": {"remembered source == read again"},
    }.get(style, set())


def by_verdict(findings, verdict):
    return {finding.check: finding.detail for finding in findings if finding.verdict == verdict}


@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_green(style):
    findings = list(verify(toy_model(style), num_new=24))
    assert by_verdict(findings, "fail") == {}
    assert by_verdict(findings, "skipped").keys() == not_asked(style)


@pytest.mark.parametrize("style", ["llama", "gemma3", "llama4", "deepseek", "t5"])
def test_in_float64_the_differences_vanish(style):
    findings = list(verify(toy_model(style, torch.float64), num_new=8))
    assert by_verdict(findings, "fail") == {}
    assert by_verdict(findings, "skipped")[KERNELS].startswith("the kernels do not know")
    exact = [finding.difference or 0 for finding in findings if " == " in finding.check]
    assert max(exact) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("style", ["mistral", "gemma3", "llama4", "deepseek", "t5"])
def test_greedy_tokens_are_equal_over_256(style):
    details = by_verdict(verify(toy_model(style)), "pass")
    assert details["greedy, cached == uncached"] == "256 of 256 tokens equal"
    assert details["speculative == greedy"].startswith("256 of 256 tokens equal")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_compiled_equals_eager():
    subject = Subject.of(toy_model("gpt2"), compiles=True)
    assert examine("compiled", CHECKS["compiled == eager"], subject).verdict == "pass"


@pytest.mark.download
def test_stories15m_is_green(stories15m):
    findings = list(verify(clearhead.load(stories15m), length=40, num_new=24))
    assert by_verdict(findings, "fail") == {}
    assert by_verdict(findings, "skipped").keys() == not_asked("llama")


@pytest.mark.download
@pytest.mark.slow
@pytest.mark.parametrize("name", ["stories15m", "smollm2_gguf"])
def test_real_models_are_green_over_256_tokens(name, request):
    findings = list(verify(clearhead.load(request.getfixturevalue(name), dtype="float32")))
    assert by_verdict(findings, "fail") == {}
    assert by_verdict(findings, "pass")["greedy, cached == uncached"] == "256 of 256 tokens equal"


# --- what a subject is


def test_the_text_passes_the_windows_unless_they_are_wide():
    assert len(Subject.of(toy_model("mistral")).rows[0]) == 96
    assert len(Subject.of(Model(windowed(300).network)).rows[0]) > 300
    wide = Subject.of(windowed(4096))
    assert len(wide.rows[0]) == 96
    finding = examine("sliding", CHECKS["sliding cache == uncached"], wide)
    assert (finding.verdict, finding.difference) == ("skipped", None)
    assert finding.detail == "96 tokens do not pass the window of 4096; --length makes them more"


def windowed(size):
    return clearhead.create(tiny_config(window=size, num_layers=1))


def test_learned_positions_bound_what_is_read_and_made():
    subject = Subject.of(toy_model("gpt2"), length=192)
    assert subject.num_new == 1
    assert all(finding.verdict != "fail" for finding in verify(toy_model("gpt2"), length=192))
    assert Subject.of(toy_model("gpt2")).num_new == 97


@pytest.mark.parametrize(
    ("style", "options", "sentence"),
    [
        ("gpt2", {"length": 193}, "length is 193; for this model it must be from 24 to 192"),
        ("llama", {"length": 3}, "length is 3; for this model it must be 24 or more"),
        ("llama", {"num_new": 0}, "0 new tokens show nothing; make it 1 or more"),
    ],
)
def test_what_cannot_be_verified_is_one_sentence(style, options, sentence):
    with pytest.raises(ClearheadError, match=sentence):
        verify(toy_model(style), **options)


def test_a_tokenizer_gives_the_text(stories_like):
    subject = Subject.of(stories_like)
    assert stories_like.tokenizer.decode(subject.rows[0]).startswith("A letter posted in the morning")
    assert [len(row) for row in subject.rows] == [96, 61, 23]


@pytest.fixture
def stories_like():
    from clearhead.cli.demo import random_model

    return random_model()


# --- verdicts


def finding_of(found, expected):
    comparison = Comparison([(torch.tensor(found), torch.tensor(expected))], "said")
    return examine("check", lambda subject: comparison, Subject.of(toy_model("llama")))


def test_the_tolerance_grows_with_the_logits():
    assert finding_of([1.0], [1.0 + 5e-6]).verdict == "pass"
    assert finding_of([1.0], [1.0 + 5e-5]).verdict == "fail"
    assert finding_of([0.0], [5e-5]).verdict == "fail"
    assert finding_of([100.0], [100.0 + 5e-4]).verdict == "pass"
    assert finding_of([100.0], [100.0]).tolerance == pytest.approx(1e-3)
    assert finding_of([2.0, -1e4], [2.0, -1e4]).tolerance == pytest.approx(2e-5)  # ruled out, and no measure
    assert finding_of([-30.0, -90.0], [-30.0, -90.0]).tolerance == pytest.approx(3e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_never_pass(value):
    for found, expected in (([value], [0.0]), ([0.0], [value]), ([value], [value])):
        finding = finding_of(found, expected)
        assert finding.verdict == "fail"
        assert finding.as_data()["largest_difference"] is None


def test_a_token_ruled_out_is_no_difference():
    ruled_out = -float("inf")
    assert finding_of([[2.0, ruled_out]], [[2.0, ruled_out]]).difference == 0.0
    assert finding_of([[2.0, ruled_out]], [[2.0, 1.0]]).verdict == "fail"
    assert finding_of([[ruled_out, ruled_out]], [[ruled_out, ruled_out]]).verdict == "fail"


@pytest.mark.parametrize("bias", [-1e4, -float("inf")])
def test_a_token_ruled_out_says_nothing_of_packed_weights(bias):
    """As the padding of Marian is: nor does it move the mean that the others are measured from."""
    model = toy_model("bart")
    head = model.network.head
    head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
    plain = eight_bits(Subject.of(model))
    with torch.no_grad():
        head.bias[:3] = bias
    ruled_out = eight_bits(Subject.of(model))
    assert ruled_out.difference == pytest.approx(plain.difference, rel=0.5)
    assert {finding.verdict for finding in verify(model, num_new=8)} <= {"pass", "skipped"}


def test_the_worst_pair_counts_wherever_it_stands():
    good, bad = (torch.zeros(2), torch.zeros(2)), (torch.zeros(2), torch.tensor([0.0, float("nan")]))
    for pairs in ([good, bad], [bad, good]):
        finding = examine("check", lambda subject, pairs=pairs: Comparison(pairs, ""), Subject.of(toy_model("llama")))
        assert finding.verdict == "fail"
    assert finding_of([0.0, 0.0], [0.0]).verdict == "fail"


def test_a_check_that_breaks_down_has_failed():
    def refuse(subject):
        raise ClearheadError("the cache holds 3 tokens")

    finding = examine("check", refuse, Subject.of(toy_model("llama")))
    assert finding == Finding("check", "fail", "ClearheadError: the cache holds 3 tokens")


def test_a_check_that_breaks_in_any_way_does_not_lose_the_others():
    finding = examine("check", lambda subject: subject.nothing_of_this_name, Subject.of(toy_model("llama")))
    assert finding.verdict == "fail"
    assert finding.detail.startswith("AttributeError: ")


def test_without_transformers_the_comparison_is_left_out(monkeypatch):
    monkeypatch.setattr(reading, "find_spec", lambda name: None)
    finding = examine("theirs", reading.in_transformers, Subject.of(toy_model("llama")))
    assert (finding.verdict, finding.detail) == ("skipped", "transformers is not installed; pip install transformers")


@pytest.mark.parametrize(("length", "verdict"), [(32, "pass"), (33, "skipped")])
def test_transformers_reads_no_more_than_its_table_of_sinusoids(length, verdict):
    model = Model(toy(shrink(preset("marian")), torch.float32))
    finding = examine("theirs", reading.in_transformers, Subject.of(model, length=length))
    assert finding.verdict == verdict, finding.detail


def test_toys_are_what_they_are_named():
    reaches = {style: {layer.attention.pattern for layer in STYLES[style]().decoder.layers} for style in WINDOWED}
    assert {style: len(kinds) for style, kinds in reaches.items()} == {
        "mistral": 1,
        "gemma3": 2,
        "llama4": 2,
        "gpt3": 2,
    }
    assert not any(isinstance(layer.attention, GroupedAttention) for layer in STYLES["deepseek"]().decoder.layers)

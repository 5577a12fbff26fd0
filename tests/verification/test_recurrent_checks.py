"""The checks of the recurrent baseline: all pass on a sound network, and each fails on the error that it looks for."""

import pytest
import torch

from clearhead.api import RecurrentBaseline
from clearhead.model import RecurrentConfig, RecurrentTranslator
from clearhead.verification import recurrent_checks, verify


@pytest.fixture(params=["tanh", "gru", "lstm"])
def model(request):
    """Return a small bidirectional network with attention."""
    torch.manual_seed(0)
    config = RecurrentConfig(
        source_vocab_size=11,
        target_vocab_size=13,
        embedding_width=6,
        width=8,
        cell=request.param,
        attention="dot_product",
        bidirectional=True,
        context=16,
    )
    return RecurrentBaseline(
        RecurrentTranslator(config).eval(), None, None, {"decoder_start_token_id": 1, "eos_token_id": 2}
    )


def verdicts(model):
    """Return the verdict on each check."""
    return {result.check.split(" ==")[0]: result.verdict for result in verify(model, num_new_tokens=6)}


def test_a_sound_network_passes(model):
    steps = []
    results = list(verify(model, num_new_tokens=6, progress=lambda *step: steps.append(step)))
    assert [result.verdict for result in results] == ["pass"] * 3
    assert all(result.difference <= result.tolerance for result in results)
    assert [step[1:] for step in steps] == [(0, 3), (1, 3), (2, 3)]


def test_an_ignored_mask_of_the_source_is_found(model, monkeypatch):
    encode = RecurrentTranslator.encode
    monkeypatch.setattr(RecurrentTranslator, "encode", lambda self, source, mask=None: encode(self, source))
    assert verdicts(model)["padded batch"] == "fail"


def test_a_step_that_forgets_its_state_is_found(model, monkeypatch):
    step = RecurrentTranslator.step
    monkeypatch.setattr(
        RecurrentTranslator,
        "step",
        lambda self, tokens, state, encoder_output: step(
            self, tokens, self.initial_state(encoder_output), encoder_output
        ),
    )
    assert verdicts(model)["step by step"] == "fail"


def test_a_token_that_is_not_the_most_likely_is_found(model, monkeypatch):
    translate = recurrent_checks.translate

    def wrong(*arguments, **options):
        return [[*answer[:-1], (answer[-1] + 1) % 13] for answer in translate(*arguments, **options)]

    monkeypatch.setattr(recurrent_checks, "translate", wrong)
    assert verdicts(model) == {"step by step": "pass", "padded batch": "pass", "generation": "fail"}

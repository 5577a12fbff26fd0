"""The answers to the page's questions equal the Python API, and wrong questions are refused in one sentence."""

import json
import math

import numpy as np
import pytest
import torch

from clearhead.api import cost
from clearhead.errors import ClearheadError
from clearhead.inspection import ablate, attribute_logit, logit_lens, patch_grid
from clearhead.inspection.page_data import thumbnails
from clearhead.server.inspection_data import QUESTIONS, Inspector
from clearhead.server.inspection_json import TokenTexts
from clearhead.tokenization import render_chat
from clearhead.tokenization.marian import load_marian_tokenizer
from tests.page.models import array, byte_model, translation_model
from tests.tokenization.test_marian import write_folder

TEXT = "a cat and a cat"


@pytest.fixture(scope="module")
def inspector():
    return Inspector(byte_model(), "toy")


@pytest.fixture(scope="module")
def tokens(inspector):
    return inspector.model.encode(TEXT)


@pytest.fixture(scope="module")
def traced(inspector, tokens):
    return inspector.model.trace(tokens)


def test_every_answer_is_json(inspector, tokens):
    body = {"tokens": tokens}
    for question, fields in {
        "model": {},
        "encode": {"text": TEXT},
        "ids": {"bytes": ["61"]},
        "trace": body,
        "probabilities": body,
        "thumbnails": body | {"layer": 0},
        "head": body | {"layer": 0, "head": 1},
        "lens": body,
        "lens-tracks": body,
        "attribution": body | {"token": 3},
        "ablation": body | {"token": 3, "parts": [{"layer": 0, "head": 1}]},
        "patch-row": body | {"corrupted": tokens[::-1], "token": 3, "layer": 1},
        "cost": {"num_prompt_tokens": 8, "num_new_tokens": 4},
        "runs": {},
        "run": {"name": "none"},
    }.items():
        json.dumps(inspector.answer(question, fields), allow_nan=False)
    assert len(QUESTIONS) == 15


def test_tokens_have_ids_texts_and_bytes(inspector):
    answer = inspector.answer("encode", {"text": "é!"})
    assert [(one["id"], one["bytes"]) for one in answer["tokens"]] == [(195, "c3"), (169, "a9"), (33, "21")]
    assert answer["tokens"][0]["text"] == "\\xc3"


def test_messages_are_encoded_as_the_template_makes_them(inspector):
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    answer = inspector.answer("encode", {"messages": messages})
    assert answer["prompt"] == render_chat(inspector.model.tokenizer, messages) == "[system]Be kind.[user]Hi[assistant]"
    expected = inspector.model.tokenizer.encode(answer["prompt"], add_special_tokens=False)
    assert [one["id"] for one in answer["tokens"]] == expected


def test_ids_are_found_by_their_bytes(inspector):
    special = inspector.model.tokenizer.eos_id
    found = inspector.answer("ids", {"bytes": ["c3", "61", b"<|endoftext|>".hex(" "), "61 62"]})
    assert found["ids"] == [0xC3, 0x61, special, None]


def test_ids_of_a_translation_are_found_although_its_first_token_has_lost_its_space(tmp_path):
    tokenizer = load_marian_tokenizer(write_folder(tmp_path))
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode_target("the cat sat on the mat.", add_special_tokens=False)
    assert len(ids) > 3
    first, *rest = [tokenizer.token_bytes(token, before) for token, before in zip(ids, [None, *ids], strict=False)]
    assert first[:1] != b" "
    assert [texts.find(first, starts_text=True), *map(texts.find, rest)] == ids


def test_probabilities_are_those_of_the_model(inspector, tokens, traced):
    probabilities = inspector.answer("probabilities", {"tokens": tokens})["probabilities"]
    assert probabilities[0] is None
    np.testing.assert_allclose(probabilities[1:], np.exp(np.asarray(inspector.model.score(tokens).logprobs)), rtol=1e-5)
    answer = inspector.answer("trace", {"tokens": tokens})
    expected = traced.logits_at(-1).softmax(dim=-1).topk(8)
    assert [one["id"] for one in answer["next"]] == expected.indices.tolist()
    np.testing.assert_allclose([one["probability"] for one in answer["next"]], expected.values, rtol=1e-5)


def test_a_head_equals_the_trace(inspector, tokens, traced):
    for layer, head in ((0, 0), (2, 3)):
        answer = inspector.answer("head", {"tokens": tokens, "layer": layer, "head": head})
        assert np.array_equal(array(answer["weights"]), traced.attention(layer, head).numpy())
        assert np.array_equal(array(answer["scores"]), traced.scores(layer, head).numpy())
        assert np.array_equal(array(answer["allowed"]), traced.allowed(layer).numpy())


def test_thumbnails_are_the_weights_in_bytes(inspector, tokens, traced):
    answer = inspector.answer("thumbnails", {"tokens": tokens, "layer": 1})
    weights = traced.attention(1)
    assert np.array_equal(array(answer["thumbnails"]), thumbnails(weights).numpy())
    assert answer["largest"] == pytest.approx(weights.amax(dim=(1, 2)).tolist())
    assert sum(values[0] for values in answer["shares"].values()) == pytest.approx(1)


def test_an_encoder_decoder_has_source_against_target():
    inspector = Inspector(translation_model(), "toy")
    body = {"tokens": [3, 1, 4], "source": [2, 7, 1, 8]}
    trace = inspector.model.trace([3, 1, 4], [2, 7, 1, 8])
    views = inspector.answer("trace", body)["views"]
    assert [view["title"] for view in views] == ["decoder self-attention", "cross-attention", "encoder self-attention"]
    exact = [trace.attention(1, 2), trace.cross_attention(1, 2), trace.attention(1, 2, stack="encoder")]
    for view, weights in enumerate(exact):
        answer = inspector.answer("head", body | {"view": view, "layer": 1, "head": 2})
        assert np.array_equal(array(answer["weights"]), weights.numpy())


@pytest.mark.parametrize("every", [1, 2])
def test_the_lens_equals_the_api_and_keeps_the_last_layer(inspector, tokens, traced, every):
    answer = inspector.answer("lens", {"tokens": tokens, "every": every, "top": 3, "positions": [2, -1]})
    expected = logit_lens(traced, top=3, every=every, positions=[2, -1])
    assert answer["positions"] == [2, len(tokens) - 1]
    assert answer["stages"][-1]["layer"] == traced.num_layers - 1
    for stage, prediction in zip(answer["stages"], expected, strict=True):
        assert (stage["layer"], stage["after"]) == (prediction.layer, prediction.after)
        assert stage["ids"] == prediction.top_ids.tolist()
        assert stage["probabilities"] == prediction.top_probabilities.tolist()
    assert set(answer["texts"]) == {str(token) for stage in answer["stages"] for row in stage["ids"] for token in row}


def test_tracks_follow_the_tokens_that_lead_somewhere(inspector, tokens, traced):
    answer = inspector.answer("lens-tracks", {"tokens": tokens, "position": -1, "count": 6})
    stages = logit_lens(traced, top=traced.config.vocab_size, positions=[-1])
    chosen = [track["id"] for track in answer["tracks"]]
    assert chosen[:3] == stages[-1].top_ids[0, :3].tolist()
    leaders = {int(stage.top_ids[0, 0]): float(stage.top_probabilities[0, 0]) for stage in stages}
    others = sorted((token for token in leaders if token not in chosen[:3]), key=lambda token: -leaders[token])
    assert set(others[:1]) <= set(chosen)
    for track in answer["tracks"]:
        for place, stage in enumerate(stages):
            assert stage.top_ids[0, track["ranks"][place]] == track["id"]
            assert track["probabilities"][place] == float(stage.top_probabilities[0, track["ranks"][place]])


def test_attribution_equals_the_api(inspector, tokens, traced):
    answer = inspector.answer("attribution", {"tokens": tokens, "token": 5, "position": 4, "against": 7})
    expected = attribute_logit(traced, 5, 4, against=7, by_head=True)
    assert answer["logit"] == expected.logit
    assert [one["logit"] for one in answer["contributions"]] == [one.logit for one in expected.contributions]


def test_switching_one_head_off_equals_an_ablation(inspector, tokens, traced):
    part = {"layer": 1, "part": "attention", "head": 2}
    answer = inspector.answer("ablation", {"tokens": tokens, "token": 9, "parts": [part]})
    expected = ablate(traced, 1, head=2)
    assert answer["gain"] == expected.gain(9)
    assert answer["divergence"] == expected.divergence
    assert [one["id"] for one in answer["after"]] == [token for token, _ in expected.top_after(8)]


def test_switching_all_heads_off_equals_switching_attention_off(inspector, tokens):
    ask = lambda parts: inspector.answer("ablation", {"tokens": tokens, "token": 9, "parts": parts})  # noqa: E731
    heads = ask([{"layer": 1, "head": head} for head in range(4)])
    assert heads["gain"] == pytest.approx(ask([{"layer": 1, "part": "attention"}])["gain"], abs=1e-5)
    assert ask([])["divergence"] == 0


def test_patched_rows_equal_the_grid(inspector, tokens, traced):
    corrupted = [*tokens[:2], 120, *tokens[3:]]
    grid = patch_grid(traced, inspector.model.trace(corrupted), 9)
    for layer in range(traced.num_layers):
        body = {"tokens": tokens, "corrupted": corrupted, "token": 9, "layer": layer}
        assert torch.tensor(inspector.answer("patch-row", body)["gains"]).equal(grid[layer])


def test_the_cost_of_a_request_is_that_of_the_api(inspector):
    answer = inspector.answer("cost", {"num_prompt_tokens": 10, "num_new_tokens": 6})
    prompt = cost(inspector.model.config, phase="prefill", context=10, dtype="float32")
    step = cost(inspector.model.config, phase="decode", context=13, dtype="float32")
    assert answer["prefill"]["flops"] == prompt.flops
    assert answer["decode"]["flops"] == 6 * step.flops
    assert answer["cache_bytes"] == 16 * prompt.cache_bytes_per_token


def test_the_flops_of_the_middle_step_times_their_number_are_those_of_all_steps(inspector):
    answer = inspector.answer("cost", {"num_prompt_tokens": 10, "num_new_tokens": 5})
    config = inspector.model.config
    steps = [cost(config, phase="decode", context=10 + number, dtype="float32").flops for number in range(5)]
    assert answer["decode"]["flops"] == sum(steps)


def test_runs_are_listed_and_read(tmp_path):
    run = tmp_path / "first"
    run.mkdir()
    rows = [{"step": step, "loss": 3.0 / step, "gradient_norm": math.inf} for step in range(1, 6)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 6, "lo')
    (run / "sample.txt").write_text("<b>Once</b>")
    (tmp_path / "empty").mkdir()
    inspector = Inspector(byte_model(), "toy", tmp_path)
    (summary,) = inspector.answer("runs", {})["runs"]
    assert (summary["name"], summary["last"]["step"]) == ("first", 5)
    answer = inspector.answer("run", {"name": "first", "after_step": 3})
    assert answer["rows"] == [{"step": 4, "loss": 0.75}, {"step": 5, "loss": 0.6}]
    assert answer["sample"] == "<b>Once</b>"
    with pytest.raises(ClearheadError, match="no run"):
        inspector.answer("run", {"name": "../first"})


def test_traces_are_kept_and_forgotten(inspector, monkeypatch):
    inspector = Inspector(inspector.model, "toy")
    for number in range(20):
        inspector.trace([1, 2, number], [])
    assert len(inspector._traces) == 8
    assert inspector.trace([1, 2, 19], []) is inspector.trace([1, 2, 19], [])


@pytest.mark.parametrize(
    ("question", "body", "message"),
    [
        ("nothing", {}, "unknown question"),
        ("head", [], "must be a JSON object"),
        ("head", {"tokens": [1], "layer": 0}, "head is missing"),
        ("head", {"tokens": [1], "layer": 0, "head": 9}, "head 9 is out of range"),
        ("head", {"tokens": [1], "layer": 99, "head": 0}, "layer 99 is out of range"),
        ("head", {"tokens": [1], "layer": 0, "head": 0, "view": 3}, "view 3 is out of range"),
        ("head", {"tokens": [1], "layer": "0", "head": 0}, "must be an integer"),
        ("trace", {"tokens": []}, "must be a list of token ids"),
        ("trace", {"tokens": [1] * 1025}, "up to 1,024"),
        ("trace", {"tokens": [10**9]}, "1000000000"),
        ("trace", {"tokens": [-1]}, "-1"),
        ("trace", {"tokens": [1], "colour": 3}, "unknown field 'colour'"),
        ("lens", {"tokens": [1] * 1024}, "ask for at most"),
        ("lens", {"tokens": [1], "top": 0}, "top is 0"),
        ("lens", {"tokens": [1], "every": 0}, "every is 0"),
        ("lens-tracks", {"tokens": [1], "count": 99}, "count is 99"),
        ("ablation", {"tokens": [1], "token": 1, "parts": [{"layer": 0, "part": "soul"}]}, "unknown part 'soul'"),
        ("ablation", {"tokens": [1], "token": 1, "parts": 3}, "list of up to"),
        ("attribution", {"tokens": [1], "token": 10**9}, "out of range"),
        ("patch-row", {"tokens": [1, 2], "corrupted": [1], "token": 1, "layer": 0}, "equal lengths"),
        ("ids", {"bytes": ["zz"]}, "write them as"),
        ("encode", {"text": 3}, "must be a text"),
        ("encode", {"messages": [{"role": 1}]}, "role and a content"),
        ("cost", {"num_prompt_tokens": 0}, "must be 1 or more"),
    ],
)
def test_wrong_questions_are_refused_in_one_sentence(inspector, question, body, message):
    with pytest.raises(ClearheadError, match=message) as caught:
        inspector.answer(question, body)
    assert "\n" not in str(caught.value)

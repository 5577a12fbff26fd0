"""The page of a trace: the numbers are the trace's, and no token can become markup."""

import base64
import hashlib
import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import clearhead
from clearhead.cli import main as _main  # noqa: F401  registers the commands
from clearhead.cli.app import app
from clearhead.errors import ClearheadError
from clearhead.inspection.document import as_json
from clearhead.inspection.labels import visible
from clearhead.inspection.output import notebook, write
from clearhead.inspection.page import THUMBNAIL, HeadSelection, page
from clearhead.inspection.views import Lens, Look, View, alignment_view, views_of
from tests.inspection.fake_views import causal_view, cross_view, lens_of
from tests.inspection.page_reader import PageReader
from tests.model.toys import decoder, encoder, toy, translator

HOSTILE = ["</script>", "<!--", "<script>", "]]>", "<img src=x onerror=alert(1)>", '"', "'", "&lt;", "\u2028", "\x00"]


def traced(config, tokens, source=None):
    return clearhead.Model(toy(config).float()).trace(tokens, source)


# --- the numbers


@pytest.mark.parametrize("config", [decoder(), encoder()], ids=["decoder", "encoder"])
def test_scores_mask_and_weights_are_those_of_the_trace(config):
    found = traced(config, [3, 1, 4, 1, 5])
    reader = PageReader(page(views_of(found), "title"))
    (view,) = reader.data["views"]
    assert view["rows"] == [str(token) for token in (3, 1, 4, 1, 5)]
    for layer in range(found.num_layers):
        entry = view["layers"][layer]
        assert np.array_equal(reader.array(entry["allowed"]), found.allowed(layer).numpy())
        for head in range(found.num_heads(layer)):
            weights = reader.array(entry["heads"][head]["weights"])
            assert np.array_equal(weights, found.attention(layer, head).numpy())
            np.testing.assert_allclose(reader.array(entry["heads"][head]["scores"]), found.scores(layer, head), 1e-6)


def test_an_encoder_decoder_has_three_views():
    found = traced(translator(), [3, 1, 4], source=[2, 7, 1, 8])
    reader = PageReader(page(views_of(found), "title"))
    own, across, source = reader.data["views"]
    assert [view["title"] for view in (own, across, source)] == [
        "decoder self-attention",
        "cross-attention",
        "encoder self-attention",
    ]
    for layer in range(found.num_layers):
        heads = {view["title"]: view["layers"][layer]["heads"] for view in (own, across, source)}
        for head in range(found.num_heads(layer)):
            shown = {title: reader.array(entries[head]["weights"]) for title, entries in heads.items()}
            assert np.array_equal(shown["decoder self-attention"], found.attention(layer, head).numpy())
            assert np.array_equal(shown["cross-attention"], found.cross_attention(layer, head).numpy())
            assert np.array_equal(
                shown["encoder self-attention"], found.attention(layer, head, stack="encoder").numpy()
            )
    assert (len(across["rows"]), len(across["columns"])) == (3, 4)


def test_the_alignments_of_the_recurrent_baseline_are_a_view_too():
    alignments = torch.rand(2, 3, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    reader = PageReader(page([alignment_view(alignments, ["je", "suis"], ["I", "am", "."])], "title"))
    (view,) = reader.data["views"]
    assert (view["rows"], view["columns"]) == (["je", "suis"], ["I", "am", "."])
    assert np.array_equal(reader.array(view["layers"][0]["heads"][0]["weights"]), alignments.numpy())


def test_the_lens_shows_the_likeliest_tokens_and_ends_with_what_the_model_says():
    found = traced(decoder(), [3, 1, 4, 1, 5])
    lens = Lens.of(found, None, num_tokens=3)
    reader = PageReader(page(views_of(found), "title", lens=lens))
    data = reader.data["lens"]
    assert data["stages"][-1] == f"layer {found.num_layers - 1} feed-forward"
    places, probabilities = reader.array(data["places"]), reader.array(data["probabilities"])
    assert places.shape == (2 * found.num_layers, 3, 5)
    best = found.logits.softmax(dim=-1)[-3:].topk(5)
    assert [[int(data["texts"][place]) for place in row] for row in places[-1]] == best.indices.tolist()
    np.testing.assert_allclose(probabilities[-1], best.values, rtol=1e-5)


def test_equal_masks_stand_in_the_page_once():
    reader = PageReader(page([causal_view(num_layers=5)], "title"))
    assert len({layer["allowed"]["array"] for layer in reader.data["views"][0]["layers"]}) == 1


def test_thumbnails_are_small_and_keep_the_largest():
    weights = torch.zeros(1, 200, 90)
    weights[0, 150, 45] = 1.0
    view = View("wide", ["q"] * 200, ["k"] * 90, [1], lambda layer, head: Look(weights))
    reader = PageReader(page([view], "title"))
    small = reader.array(reader.data["views"][0]["layers"][0]["thumbnails"])
    assert small.shape == (1, THUMBNAIL, THUMBNAIL)
    assert small.max() == 255
    assert np.argwhere(small[0]).tolist() == [[150 * THUMBNAIL // 200, 45 * THUMBNAIL // 90]]


# --- what fits


def held(reader, view=0):
    layers = reader.data["views"][view]["layers"]
    return {(entry["number"], head) for entry in layers for head, found in enumerate(entry["heads"]) if found}


def test_what_was_asked_for_comes_first():
    view = causal_view(length=10, num_layers=3, num_heads=4)
    assert len(held(PageReader(page([view], "title")))) == 12
    assert held(PageReader(page([view], "title", most_cells=500))) == {(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)}
    reader = PageReader(page([view], "title", chosen=HeadSelection(2, 3), most_cells=500))
    assert held(reader) == {(2, 0), (2, 1), (2, 2), (2, 3), (0, 3)}
    assert reader.data["start"] == {"layer": 2, "head": 3}
    assert held(PageReader(page([view], "title", chosen=HeadSelection(2, 3), most_cells=100))) == {(2, 3)}
    assert all("thumbnails" in layer for layer in reader.data["views"][0]["layers"])


def test_a_text_too_long_for_a_page_is_refused():
    with pytest.raises(ClearheadError, match="30 tokens is too long for a page"):
        page([causal_view(length=30)], "title", most_cells=500)


# --- safety


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(HOSTILE), st.text()), min_size=1, max_size=6), st.text())
def test_no_text_becomes_markup(texts, title):
    weights = torch.full((1, len(texts), len(texts)), 1 / len(texts))
    made = page([View("<b>", texts, texts, [1], lambda layer, head: Look(weights))], title, subtitle="</style>")
    plain = page(
        [View("view", ["a"] * len(texts), ["a"] * len(texts), [1], lambda layer, head: Look(weights))], "title"
    )
    reader = PageReader(made)
    assert [tag for tag, _ in reader.tags] == [tag for tag, _ in PageReader(plain).tags]
    assert len(reader.data["views"][0]["rows"]) == len(texts)
    assert reader.program == PageReader(plain).program


def test_json_cannot_end_its_element():
    assert "<" not in as_json(HOSTILE)
    assert json.loads(as_json(HOSTILE)) == HOSTILE


def test_the_policy_allows_this_script_and_these_styles_only():
    reader = PageReader(page([causal_view()], "title"))
    rules = dict(rule.strip().split(" ", 1) for rule in reader.policy.split(";"))
    assert rules["default-src"] == "'none'"
    for rule, text in (("script-src", reader.program), ("style-src", reader.styles)):
        assert rules[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_page_reaches_for_nothing_outside():
    made = page([causal_view(), cross_view()], "title", lens=lens_of(causal_view()))
    reader = PageReader(made)
    assert not [attributes for _, attributes in reader.tags if "src" in attributes]
    assert [attributes["href"] for _, attributes in reader.tags if "href" in attributes] == ["data:,"]
    assert not re.search(
        r"https?:|//[a-z]|url\(|fetch\(|XMLHttpRequest|innerHTML|\beval\b", reader.program + reader.styles
    )


# --- notebooks


def test_a_notebook_shows_the_page_in_a_frame_without_access():
    found = traced(decoder(), [3, 1, 4])
    shown = notebook(found)
    (tag, attributes), *rest = PageReader(shown).tags
    assert (tag, attributes["sandbox"], rest) == ("iframe", "allow-scripts", [])
    inner = PageReader(html.unescape(re.search(r'srcdoc="([^"]*)"', shown)[1]))
    entry = inner.data["views"][0]["layers"][1]["heads"][2]
    assert np.array_equal(inner.array(entry["weights"]), found.attention(1, 2).numpy())


def test_a_notebook_leaves_out_what_would_be_slow(monkeypatch):
    monkeypatch.setattr("clearhead.inspection.output.MOST_NOTEBOOK_CELLS", 71)
    assert notebook(traced(decoder(), [3, 1, 4])) is None  # 2 layers of 4 heads on 3 tokens: 72


# --- files and the command


def test_files_by_their_ending(tmp_path):
    found = traced(decoder(), [3, 1, 4])
    for name in ("page.html", "map.PNG", "trace.safetensors"):
        write(found, tmp_path / name, HeadSelection() if name.endswith("tensors") else HeadSelection(layer=-1, head=0))
        assert (tmp_path / name).stat().st_size > 100
    with pytest.raises(ClearheadError, match=r"ends in .html, .png, .safetensors"):
        write(found, tmp_path / "page.pdf", HeadSelection())
    with pytest.raises(ClearheadError, match="head 9 is out of range"):
        write(found, tmp_path / "page.html", HeadSelection(layer=0, head=9))
    with pytest.raises(ClearheadError, match=r"the lens does not go into a \.png file"):
        write(found, tmp_path / "map.png", HeadSelection(), Lens.of(found, None))
    with pytest.raises(ClearheadError, match="holds every layer and head"):
        write(found, tmp_path / "trace.safetensors", HeadSelection(layer=0))


def run(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False, **options)


def test_trace_as_json_is_the_python_trace(stories15m):
    told = json.loads(
        run("trace", stories15m, "Once upon a time", "--layer", 2, "--head", 1, "--lens", "--json").stdout
    )
    found = clearhead.load(stories15m, dtype="float32").trace("Once upon a time")
    assert told["tokens"] == found.tokens
    assert (told["layer"], told["heads"]) == (2, [1])
    assert torch.tensor(told["weights"][0]).equal(found.attention(2, 1))
    best = found.logits[-1].softmax(dim=-1).topk(5).values.tolist()
    assert told["lens"][-1]["probabilities"] == pytest.approx(best, rel=1e-5)
    assert told["lens"][-1]["tokens"][0].strip() == ","


def test_trace_prints_a_heatmap_and_the_lens(stories15m):
    shown = run("trace", stories15m, "-", "--lens", input="Once upon a time").stdout
    assert "layer 5, mean of 6 heads" in shown
    assert "   4 ␣time" in shown
    assert "layer 5 feed-forward" in shown


def test_trace_of_a_translator_looks_across(opus_mt, tmp_path):
    told = json.loads(run("trace", opus_mt, "I love you", "--source", "我爱你", "--json").stdout)
    assert told["attention"] == "cross-attention"
    assert "我" in "".join(told["keys"])
    shown = run("trace", opus_mt, "I love you", "--source", "我爱你").stdout
    assert all(f"{number} {visible(text)}" in shown for number, text in enumerate(told["keys"]))
    run("trace", opus_mt, "I love you", "--source", "我爱你", "--out", tmp_path / "page.html")
    assert len(PageReader((tmp_path / "page.html").read_text(encoding="utf-8")).data["views"]) == 3


def test_an_answer_is_read_as_far_as_it_is_given(opus_mt):
    """What comes after the whole answer is its end, which the tokenizer adds to a text."""
    model = clearhead.load(opus_mt, dtype="float32")
    traced = model.trace("I love you.", source="我爱你")
    assert [*traced.tokens[1:], traced.logits_at(-1).argmax()] == model.encode("I love you.")
    assert model.trace("", source="我爱你").tokens == [model.text_generator.start_id]


def test_a_wrong_ending_is_told_before_a_model_is_read(tmp_path):
    with pytest.raises(ClearheadError, match=r"page\.doc"):
        run("trace", "no-such-model", "text", "--out", tmp_path / "page.doc")
    with pytest.raises(ClearheadError, match="there is no folder"):
        run("trace", "no-such-model", "text", "--out", tmp_path / "none" / "page.html")


def test_book_command(tmp_path):
    assert run("book", "--out", tmp_path / "book.html").stdout.strip() == str(tmp_path / "book.html")
    for command in (("book",), ("trace", "no-such-model", "text")):
        with pytest.raises(ClearheadError, match=r"book\.html exists already; give another name, or --overwrite"):
            run(*command, "--out", tmp_path / "book.html")
    assert run("book", "--out", tmp_path / "book.html", "--overwrite").stdout
    with pytest.raises(ClearheadError, match=r"ends in \.html"):
        run("book", "--out", tmp_path / "book.txt")
    assert "Heatmap D" in Path(tmp_path / "book.html").read_text(encoding="utf-8")
    assert json.loads(run("book", "--json").stdout)[0]["statement"] == "A1, A2"

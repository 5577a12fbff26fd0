"""Test the page of a trace: its numbers are those of the trace, and no token becomes markup."""

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
from clearhead.inspection.document import script_json
from clearhead.inspection.export import export_trace
from clearhead.inspection.head_ranking import HeadSelection
from clearhead.inspection.lens import make_lens_table
from clearhead.inspection.page import render_page
from clearhead.inspection.page_data import THUMBNAIL_SIZE
from clearhead.inspection.token_labels import printable
from clearhead.inspection.views import AttentionMatrices, AttentionView, alignment_view
from tests.inspection.fake_views import causal_view, cross_view, random_lens
from tests.inspection.page_reader import PageReader, assert_scores_are_rounded, assert_weights_are_rounded
from tests.model.toys import decoder, encoder, toy, translator

HOSTILE = ["</script>", "<!--", "<script>", "]]>", "<img src=x onerror=alert(1)>", '"', "'", "&lt;", "\u2028", "\x00"]


def trace_toy(config, tokens, source=None):
    return clearhead.Model(toy(config).float()).trace(tokens, source)


# --- numbers


@pytest.mark.parametrize("config", [decoder(), encoder()], ids=["decoder", "encoder"])
def test_scores_mask_and_weights_equal_those_of_the_trace(config):
    traced = trace_toy(config, [3, 1, 4, 1, 5])
    reader = PageReader(render_page(traced.attention_views(), "title"))
    (view,) = reader.data["views"]
    assert view["rows"] == [str(token) for token in (3, 1, 4, 1, 5)]
    for layer in range(traced.num_layers):
        entry = view["layers"][layer]
        assert np.array_equal(reader.array(entry["allowed"]), traced.allowed(layer).numpy())
        for head in range(traced.num_heads(layer)):
            assert_weights_are_rounded(reader.weights(view, layer, head), traced.attention(layer, head).numpy())
            assert_scores_are_rounded(reader.scores(view, layer, head), traced.scores(layer, head).numpy())


def test_an_encoder_decoder_page_has_three_views():
    traced = trace_toy(translator(), [3, 1, 4], source=[2, 7, 1, 8])
    reader = PageReader(render_page(traced.attention_views(), "title"))
    decoder_view, cross, encoder_view = reader.data["views"]
    assert [view["title"] for view in (decoder_view, cross, encoder_view)] == [
        "decoder self-attention",
        "cross-attention",
        "encoder self-attention",
    ]
    for layer in range(traced.num_layers):
        for head in range(traced.num_heads(layer)):
            for view, exact in (
                (decoder_view, traced.attention(layer, head)),
                (cross, traced.cross_attention(layer, head)),
                (encoder_view, traced.attention(layer, head, stack="encoder")),
            ):
                assert_weights_are_rounded(reader.weights(view, layer, head), exact.numpy())
    assert (len(cross["rows"]), len(cross["columns"])) == (3, 4)


def test_the_alignments_of_the_recurrent_baseline_can_be_shown():
    alignments = torch.rand(2, 3, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    reader = PageReader(render_page([alignment_view(alignments, ["je", "suis"], ["I", "am", "."])], "title"))
    (view,) = reader.data["views"]
    assert (view["rows"], view["columns"]) == (["je", "suis"], ["I", "am", "."])
    assert_weights_are_rounded(reader.weights(view, 0, 0), alignments.numpy())


def test_the_lens_shows_the_most_likely_tokens_and_ends_with_the_model_s_prediction():
    traced = trace_toy(decoder(), [3, 1, 4, 1, 5])
    lens = make_lens_table(traced, None, num_tokens=3)
    reader = PageReader(render_page(traced.attention_views(), "title", lens=lens))
    data = reader.data["lens"]
    assert data["stages"][-1] == f"layer {traced.num_layers - 1} feed-forward"
    places, probabilities = reader.array(data["places"]), reader.array(data["probabilities"])
    assert places.shape == (2 * traced.num_layers, 3, 5)
    best = traced.logits.softmax(dim=-1)[-3:].topk(5)
    assert [[int(data["texts"][place]) for place in row] for row in places[-1]] == best.indices.tolist()
    np.testing.assert_allclose(probabilities[-1] / 65535, best.values, atol=1e-5)


def test_equal_masks_are_embedded_once():
    reader = PageReader(render_page([causal_view(num_layers=5)], "title"))
    assert len({layer["allowed"]["offset"] for layer in reader.data["views"][0]["layers"]}) == 1


def test_thumbnails_of_heads_without_weights_are_max_pooled():
    weights = torch.zeros(2, 200, 90)
    weights[1, 150, 45] = 1.0
    view = AttentionView("wide", ["q"] * 200, ["k"] * 90, [2], lambda layer, head: AttentionMatrices(weights))
    reader = PageReader(render_page([view], "title", selection=HeadSelection(head=0), max_cells=200 * 90))
    entry = reader.data["views"][0]["layers"][0]
    pooled = reader.array(entry["thumbnails"])
    assert entry["full"] == [0]
    assert pooled.shape == (1, THUMBNAIL_SIZE, THUMBNAIL_SIZE)
    assert pooled.max() == 255
    assert np.argwhere(pooled[0]).tolist() == [[150 * THUMBNAIL_SIZE // 200, 45 * THUMBNAIL_SIZE // 90]]


def test_numbers_that_are_not_finite_have_a_level_of_their_own():
    weights, scores = torch.full((1, 2, 2), 0.5), torch.tensor([[[1.0, -torch.inf], [torch.nan, 3.0]]])
    weights[0, 1, 0] = torch.nan
    view = AttentionView("broken", ["a", "b"], ["a", "b"], [1], lambda layer, head: AttentionMatrices(weights, scores))
    reader = PageReader(render_page([view], "title"))
    entry = reader.data["views"][0]["layers"][0]
    assert reader.array(entry["weights"]).tolist() == [[254, 254, 255, 254]]
    assert reader.array(entry["scores"]).tolist() == [[[0, 255], [255, 254]]]


# --- the first head


def induction_like_view(length=12):
    """Return 2 layers of 3 heads that attend to the first token; layer 1, head 2 attends to the token 4 before."""
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    weights = torch.zeros(2, 3, length, length)
    weights[..., 0] = 1.0
    for query in range(6, length):
        weights[1, 2, query] = torch.eye(length)[query - 4] * 0.9 + torch.eye(length)[0] * 0.1
    texts = [f"t{number}" for number in range(length)]
    return AttentionView(
        "self", texts, texts, [3, 3], lambda layer, head: AttentionMatrices(weights[layer], None, allowed)
    )


def test_the_page_opens_on_the_head_with_the_largest_specific_share():
    data = PageReader(render_page([induction_like_view()], "title")).data
    assert (data["start"]["view"], data["start"]["layer"], data["start"]["head"]) == (0, 1, 2)
    assert (data["start"]["row"], data["start"]["column"]) in [(query, query - 4) for query in range(6, 12)]
    assert data["ranking"][0] == data["start"]
    assert data["ranking"][0]["specific"] > 0.5
    assert all(head["specific"] == 0 for head in data["ranking"][1:])
    shares = data["views"][0]["layers"][1]["shares"]
    assert sum(values[2] for values in shares.values()) == pytest.approx(1, abs=0.005)


def test_the_page_opens_on_the_selected_head_or_the_best_one_of_the_selected_layer():
    views = [causal_view(length=10, num_layers=3, num_heads=4)]
    data = PageReader(render_page(views, "title", selection=HeadSelection(layer=2))).data
    shares = data["views"][0]["layers"][2]["shares"]["specific"]
    assert (data["start"]["layer"], data["start"]["head"]) == (2, shares.index(max(shares)))
    data = PageReader(render_page(views, "title", selection=HeadSelection(0, 3))).data
    assert (data["start"]["layer"], data["start"]["head"]) == (0, 3)


def test_a_text_too_short_to_rank_heads_opens_on_the_first_head():
    data = PageReader(render_page([causal_view(length=3)], "title")).data
    assert data["start"] == {"view": 0, "layer": 0, "head": 0, "specific": None, "row": 2, "column": 0}
    assert data["ranking"] == []


# --- size limits


def test_a_page_of_70_tokens_of_a_model_of_135_million_parameters_is_below_3_megabytes():
    """Random scores compress worse than those of a real model: SmolLM2 gives 2.6 MB."""
    view = causal_view(length=70, num_layers=30, num_heads=9)
    page = render_page([view], "title", lens=random_lens(view, num_layers=30))
    assert len(page.encode("utf-8")) < 3_000_000
    assert len(embedded_heads(PageReader(page))) == 270


def embedded_heads(reader):
    """Return the (layer, head) pairs whose full matrices are in the page."""
    return {(entry["number"], head) for entry in reader.data["views"][0]["layers"] for head in entry["full"]}


def test_selected_heads_are_embedded_first_and_then_the_most_specific():
    view, selection = causal_view(length=10, num_layers=3, num_heads=4), HeadSelection(2, 3)
    complete = PageReader(render_page([view], "title"))
    assert len(embedded_heads(complete)) == 12
    unselected = PageReader(render_page([view], "title", max_cells=500))
    best = {(head["layer"], head["head"]) for head in complete.data["ranking"][:5]}
    assert embedded_heads(unselected) == best
    selected = PageReader(render_page([view], "title", selection=selection, max_cells=500))
    assert embedded_heads(selected) > {(2, 0), (2, 1), (2, 2), (2, 3)}
    smallest = PageReader(render_page([view], "title", selection=selection, max_cells=100))
    assert embedded_heads(smallest) == {(2, 3)}
    assert all(
        len(layer["full"]) + (layer["thumbnails"] or {"shape": [0]})["shape"][0] == 4
        for layer in selected.data["views"][0]["layers"]
    )


def test_a_text_too_long_for_a_page_raises():
    with pytest.raises(ClearheadError, match="30 tokens is too long for a page"):
        render_page([causal_view(length=30)], "title", max_cells=500)


# --- safety


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(HOSTILE), st.text()), min_size=1, max_size=6), st.text())
def test_no_token_text_or_title_becomes_markup(texts, title):
    weights = torch.full((1, len(texts), len(texts)), 1 / len(texts))

    def make_view(title, texts):
        return AttentionView(title, texts, texts, [1], lambda layer, head: AttentionMatrices(weights))

    html_page = render_page([make_view("<b>", texts)], title, subtitle="</style>")
    plain = render_page([make_view("view", ["a"] * len(texts))], "title")
    reader = PageReader(html_page)
    assert [tag for tag, _ in reader.tags] == [tag for tag, _ in PageReader(plain).tags]
    assert len(reader.data["views"][0]["rows"]) == len(texts)
    assert reader.program == PageReader(plain).program


def test_script_json_cannot_end_its_element():
    assert "<" not in script_json(HOSTILE)
    assert json.loads(script_json(HOSTILE)) == HOSTILE


def test_the_security_policy_allows_only_the_page_s_own_script_and_styles():
    reader = PageReader(render_page([causal_view()], "title"))
    rules = dict(rule.strip().split(" ", 1) for rule in reader.policy.split(";"))
    assert rules["default-src"] == "'none'"
    for rule, text in (("script-src", reader.program), ("style-src", reader.styles)):
        assert rules[rule] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_page_loads_nothing_from_outside():
    html_page = render_page([causal_view(), cross_view()], "title", lens=random_lens(causal_view()))
    reader = PageReader(html_page)
    assert not [attributes for _, attributes in reader.tags if "src" in attributes]
    assert [attributes["href"] for _, attributes in reader.tags if "href" in attributes] == ["data:,"]
    assert not re.search(
        r"https?:|//[a-z]|url\(|fetch\(|XMLHttpRequest|innerHTML|\beval\b", reader.program + reader.styles
    )


# --- notebooks


def test_a_notebook_shows_the_page_in_a_sandboxed_frame():
    traced = trace_toy(decoder(), [3, 1, 4])
    frame = traced._repr_html_()
    (tag, attributes), *rest = PageReader(frame).tags
    assert (tag, attributes["sandbox"], rest) == ("iframe", "allow-scripts", [])
    inner = PageReader(html.unescape(re.search(r'srcdoc="([^"]*)"', frame)[1]))
    assert_weights_are_rounded(inner.weights(inner.data["views"][0], 1, 2), traced.attention(1, 2).numpy())


def test_a_notebook_shows_no_page_that_would_be_slow(monkeypatch):
    monkeypatch.setattr("clearhead.inspection.notebook._MAX_COMPUTED_CELLS", 71)
    assert trace_toy(decoder(), [3, 1, 4])._repr_html_() is None  # 2 layers of 4 heads on 3 tokens: 72


# --- files and the commands


def test_export_trace_chooses_the_format_by_extension(tmp_path):
    traced = trace_toy(decoder(), [3, 1, 4])
    for name in ("page.html", "map.PNG", "trace.safetensors"):
        selection = HeadSelection() if name.endswith("tensors") else HeadSelection(layer=-1, head=0)
        export_trace(traced, tmp_path / name, selection)
        assert (tmp_path / name).stat().st_size > 100
    with pytest.raises(ClearheadError, match=r"unsupported extension; use .html or .png or .safetensors"):
        export_trace(traced, tmp_path / "page.pdf", HeadSelection())
    with pytest.raises(ClearheadError, match="head 9 is out of range"):
        export_trace(traced, tmp_path / "page.html", HeadSelection(layer=0, head=9))
    with pytest.raises(ClearheadError, match=r"a \.png file cannot contain the lens"):
        export_trace(traced, tmp_path / "map.png", HeadSelection(), make_lens_table(traced, None))
    with pytest.raises(ClearheadError, match="contains every layer and head"):
        export_trace(traced, tmp_path / "trace.safetensors", HeadSelection(layer=0))


def run_command(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False, **options)


def test_trace_json_equals_the_python_trace(stories15m):
    data = json.loads(
        run_command("trace", stories15m, "Once upon a time", "--layer", 2, "--head", 1, "--lens", "--json").stdout
    )
    traced = clearhead.load(stories15m, dtype="float32").trace("Once upon a time")
    assert data["tokens"] == traced.tokens
    assert (data["layer"], data["heads"]) == (2, [1])
    assert torch.tensor(data["weights"][0]).equal(traced.attention(2, 1))
    best = traced.logits[-1].softmax(dim=-1).topk(5).values.tolist()
    assert data["lens"][-1]["probabilities"] == pytest.approx(best, rel=1e-5)
    assert data["lens"][-1]["tokens"][0].strip() == ","


def test_trace_prints_a_heatmap_and_the_lens(stories15m):
    shown = run_command("trace", stories15m, "-", "--lens", input="Once upon a time").stdout
    assert "layer 5, mean of 6 heads" in shown
    assert "   4 ␣time" in shown
    assert "layer 5 feed-forward" in shown


def test_trace_of_an_encoder_decoder_shows_cross_attention(opus_mt, tmp_path):
    data = json.loads(run_command("trace", opus_mt, "I love you", "--source", "我爱你", "--json").stdout)
    assert data["attention"] == "cross-attention"
    assert "我" in "".join(data["keys"])
    shown = run_command("trace", opus_mt, "I love you", "--source", "我爱你").stdout
    assert all(f"{number} {printable(text)}" in shown for number, text in enumerate(data["keys"]))
    written = run_command("trace", opus_mt, "I love you", "--source", "我爱你", "--out", tmp_path / "page.html").stdout
    assert re.match(
        rf"{re.escape(str(tmp_path))}/page\.html: \d+\.\d kB; open file://.*/page\.html in a browser", written
    )
    page = PageReader((tmp_path / "page.html").read_text(encoding="utf-8")).data
    assert len(page["views"]) == 3
    assert page["subtitle"] == f"{opus_mt}: 6 layers, 4 tokens after {len(data['keys'])} source tokens"


def test_the_decoder_reads_tokens_of_the_target_language(opus_mt):
    """The tokenizer segments a source text for the source language, which would spell "love" as three tokens."""
    traced = clearhead.load(opus_mt, dtype="float32").trace("I love you very much.", source="我非常爱你。")
    assert traced.token_texts == ["<pad>", " I", " love", " you", " very", " much", "."]
    assert "".join(traced.source_texts) == " 我非常爱你。</s>"


def test_the_decoder_reads_the_answer_without_its_end_token(opus_mt):
    """The tokenizer adds an end token to a text; it is what the model predicts after the whole answer."""
    model = clearhead.load(opus_mt, dtype="float32")
    traced = model.trace("I love you.", source="我爱你")
    assert [*traced.tokens[1:], traced.logits_at(-1).argmax()] == model.tokenizer.encode_target("I love you.")
    assert model.trace("", source="我爱你").tokens == [model.text_generator.start_id]


def test_a_wrong_extension_raises_before_the_model_is_loaded(tmp_path):
    with pytest.raises(ClearheadError, match=r"page\.doc"):
        run_command("trace", "capitals", "text", "--out", tmp_path / "page.doc")
    with pytest.raises(ClearheadError, match=r"the folder .* does not exist"):
        run_command("trace", "capitals", "text", "--out", tmp_path / "none" / "page.html")


def test_book_command_writes_html_and_prints_json(tmp_path):
    path = tmp_path / "book.html"
    written = run_command("book", "--out", path).stdout.strip()
    assert re.fullmatch(rf"{re.escape(str(path))}: \d+\.\d kB; open {re.escape(path.as_uri())} in a browser", written)
    for command in (("book",), ("trace", "capitals", "text")):
        with pytest.raises(ClearheadError, match=r"book\.html already exists; choose another name or add --overwrite"):
            run_command(*command, "--out", tmp_path / "book.html")
    assert run_command("book", "--out", tmp_path / "book.html", "--overwrite").stdout
    with pytest.raises(ClearheadError, match=r"unsupported extension; use \.html"):
        run_command("book", "--out", tmp_path / "book.txt")
    assert "Heatmap D" in Path(tmp_path / "book.html").read_text(encoding="utf-8")
    assert json.loads(run_command("book", "--json").stdout)[0]["number"] == "A1"

"""The pages in headless Chromium, from disk and with the network off."""

import re
import shutil
import subprocess
import tarfile

import pytest
import torch

import clearhead
from clearhead.inspection.book import book_page
from clearhead.inspection.document import framed
from clearhead.inspection.page import HeadSelection, page
from clearhead.inspection.views import views_of
from tests.inspection.fake_views import causal_view, cross_view, lens_of

pytestmark = pytest.mark.slow

LENGTH = 12


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser is driven by playwright")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("there is no Chromium here")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """The source of axe-core, fetched by npm into a temporary folder."""
    folder = tmp_path_factory.mktemp("axe")
    if shutil.which("npm") is None:
        pytest.skip("axe-core comes by npm, which is not here")
    fetched = subprocess.run(["npm", "pack", "axe-core@4"], cwd=folder, capture_output=True, timeout=120, check=False)
    packages = list(folder.glob("*.tgz"))
    if fetched.returncode or not packages:
        pytest.skip("npm could not fetch axe-core")
    with tarfile.open(packages[0]) as archive:
        return archive.extractfile("package/axe.min.js").read().decode("utf-8")


@pytest.fixture
def opened(chromium, tmp_path):
    """A function that opens HTML from disk; what the console said and what was asked of the network must be nothing."""
    contexts, said = [], []

    def open_page(html, fragment="", **options):
        (tmp_path / "page.html").write_text(html, encoding="utf-8")
        context = chromium.new_context(**({"offline": True, "viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: said.extend(outside(request.url)))
        tab.on("dialog", lambda dialog: said.append("dialog"))
        tab.goto((tmp_path / "page.html").as_uri() + fragment)
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def outside(address):
    return [] if address.startswith(("file:", "data:")) else [address]


@pytest.fixture
def view():
    return causal_view(length=LENGTH, num_layers=3, num_heads=4)


def residuals(tab):
    """Query, key, score and weight as the readout says them."""
    text = tab.locator("#readout").text_content()
    found = re.fullmatch(r"query (\d+) “.*” → key (\d+) “.*”: score (\S+?)(, masked)?, weight (\S+)", text, re.DOTALL)
    assert found, text
    query, key, score, masked, weight = found.groups()
    return int(query), int(key), float(score), masked is not None, float(weight)


def point_at(tab, row, column):
    """The middle of a cell, from the drawn size: labels on two sides, two pixels at the others."""
    box = tab.locator("#matrix").bounding_box()
    cell = (box["width"] - 98) // LENGTH
    tab.mouse.move(box["x"] + 96 + (column + 0.5) * cell, box["y"] + 96 + (row + 0.5) * cell)


def test_every_value_under_the_pointer_is_the_trace_s(opened, view):
    tab = opened(page([view], "title"))
    look = view.look(0, None)
    for row in range(0, LENGTH, 3):
        for column in range(0, LENGTH, 2):
            point_at(tab, row, column)
            query, key, score, masked, weight = residuals(tab)
            assert (query, key) == (row, column)
            assert score == pytest.approx(float(look.scores[0, row, column]), rel=1e-5)
            assert weight == pytest.approx(float(look.weights[0, row, column]), rel=1e-5, abs=1e-12)
            assert masked == (column > row)


def test_a_real_model_s_page_says_what_its_trace_says(opened, stories15m):
    traced = clearhead.load(stories15m, dtype="float32").trace("Once upon a time there was a little girl")
    tab = opened(page(views_of(traced), "title"))
    for layer, head, row, column in ((0, 0, 8, 3), (3, 5, 7, 0), (5, 2, 4, 4)):
        tab.get_by_label(f"layer {layer}, head {head}", exact=True).click()
        tab.locator("#matrix").focus()
        for key, times in (("PageUp", 1), ("Home", 1), ("ArrowDown", row), ("ArrowRight", column)):
            for _ in range(times):
                tab.keyboard.press(key)
        query, key, score, masked, weight = residuals(tab)
        assert (query, key, masked) == (row, column, False)
        assert score == pytest.approx(float(traced.scores(layer, head)[row, column]), rel=1e-5)
        assert weight == pytest.approx(float(traced.attention(layer, head)[row, column]), rel=1e-5)


def test_a_click_and_the_arrow_keys_choose_a_head(opened, view):
    tab = opened(page([view], "title"))
    tab.get_by_label("layer 2, head 1", exact=True).click()
    assert "layer 2, head 1" in tab.locator("#head-heading").text_content()
    row, column, _, _, weight = residuals(tab)
    assert weight == pytest.approx(float(view.look(2, None).weights[1, row, column]), rel=1e-5)
    tab.keyboard.press("ArrowUp")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    assert "layer 1, head 3" in tab.locator("#head-heading").text_content()
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == "layer 1, head 3"


def test_the_arrow_keys_move_the_cell(opened, view):
    tab = opened(page([view], "title", chosen=HeadSelection(1, 2)))
    tab.locator("#matrix").focus()
    for key in ("ArrowUp", "ArrowRight", "ArrowRight"):
        tab.keyboard.press(key)
    query, key, score, _, weight = residuals(tab)
    assert (query, key) == (LENGTH - 2, 2)
    assert score == pytest.approx(float(view.look(1, None).scores[2, query, key]), rel=1e-5)
    assert weight == pytest.approx(float(view.look(1, None).weights[2, query, key]), rel=1e-5)


def test_the_table_walks_from_score_to_mask_to_weight(opened, view):
    tab = opened(page([view], "title"), fragment="#0/0/0/weights/5/0")
    look = view.look(0, None)
    rows = tab.locator("#row tr").all()
    assert len(rows) == LENGTH
    weights = []
    for column, row in enumerate(rows):
        _, score, masked, weight = row.locator("td").all_text_contents()
        assert float(score) == pytest.approx(float(look.scores[0, 5, column]), rel=1e-5)
        assert masked == (score if column <= 5 else "−∞")
        weights.append(float(weight))
    assert torch.tensor(weights).sum().item() == pytest.approx(1, abs=1e-5)


def pixel(tab, row, column):
    """The colour drawn in a corner of a cell."""
    script = """([row, column, count]) => {
      const drawn = document.getElementById("matrix");
      const cell = Math.floor((drawn.width - 98) / count);
      const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
      copy.drawImage(drawn, -96 - column * cell - 2, -96 - row * cell - 2);
      return [...copy.getImageData(0, 0, 1, 1).data];
    }"""
    return tuple(tab.evaluate(script, [row, column, LENGTH])[:3])


def test_the_steps_are_drawn_as_scores_mask_and_weights(opened, view):
    tab = opened(page([view], "title"))
    grey = (232, 226, 217)
    tab.get_by_label("scores", exact=True).check()
    assert pixel(tab, 0, 5) != grey
    tab.get_by_label("after the mask", exact=True).check()
    assert pixel(tab, 0, 5) == grey
    tab.get_by_label("weights (softmax)", exact=True).check()
    assert pixel(tab, 0, 5) == grey
    assert pixel(tab, 0, 0) == (6, 38, 77)  # weight 1: the end of the ramp


def test_views_change_and_a_view_without_scores_has_no_steps(opened, view):
    tab = opened(page([view, cross_view()], "title", lens=lens_of(view)))
    assert tab.locator("#lens").is_visible()
    tab.get_by_label("cross-attention").check()
    assert "cross-attention, layer 0, head 0" in tab.locator("#head-heading").text_content()
    assert not tab.locator("#steps").is_visible()
    assert not tab.locator("#lens").is_visible()


def test_the_lens_follows_the_query(opened, view):
    lens = lens_of(view)
    tab = opened(page([view], "title", lens=lens), fragment="#0/0/0/weights/4/0")
    first = tab.locator("#lens-rows tr").first.locator("td").first
    probability = float(lens.probabilities[-1, 4, 0])
    assert first.text_content().endswith(f"{100 * probability:.1f} %")
    tab.get_by_label("the likeliest token everywhere").check()
    shown = tab.locator("#lens-rows tr").first.locator("td small").all_text_contents()
    assert shown == [f"{100 * float(share):.1f} %" for share in lens.probabilities[-1, :, 0]]


def test_the_address_brings_back_the_same_head(opened, view):
    tab = opened(page([view], "title"), fragment="#0/2/3/scores/7/1")
    assert "layer 2, head 3" in tab.locator("#head-heading").text_content()
    assert residuals(tab)[:2] == (7, 1)
    assert tab.get_by_label("scores", exact=True).is_checked()


def test_tokens_are_text_and_never_run(opened):
    view = causal_view(length=LENGTH)
    tab = opened(page([view], "<img src=x onerror=alert(1)>"))
    assert tab.locator("img").count() == 0
    assert tab.locator("h1").text_content() == "<img src=x onerror=alert(1)>"
    assert "<img␣onerror=alert(1)>" in tab.locator("#text").text_content()


def test_a_notebook_frame_works_inside_another_page(opened, view):
    tab = opened(f"<!DOCTYPE html><title>notebook</title>{framed(page([view], 'title'), height_pixels=800)}")
    inner = tab.frame_locator("iframe")
    inner.get_by_label("layer 1, head 1", exact=True).click()
    assert "layer 1, head 1" in inner.locator("#head-heading").text_content()


def test_five_hundred_tokens_stay_responsive(opened):
    view = causal_view(length=512, num_layers=30, num_heads=9)
    tab = opened(page([view], "title"))
    seconds = tab.evaluate("""() => {
      const start = performance.now();
      document.querySelector('[aria-label="layer 1, head 2"]').click();
      return (performance.now() - start) / 1000;
    }""")
    assert seconds < 1
    tab.get_by_label("layer 29, head 8", exact=True).click()
    assert "--layer 29" in tab.locator("#readout").text_content()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_nothing_serious(opened, axe, scheme, width):
    view = causal_view(length=150, num_layers=12, num_heads=9)  # enough for every part to scroll
    pages = {"trace": page([view, cross_view()], "title", lens=lens_of(view)), "book": book_page()}
    for name, html in pages.items():
        tab = opened(html, color_scheme=scheme, viewport={"width": width, "height": 900})
        tab.evaluate(axe)
        found = tab.evaluate("async () => (await axe.run()).violations")
        serious = [each for each in found if each["impact"] in ("serious", "critical")]
        assert not serious, (name, [(each["id"], each["nodes"][0]["html"]) for each in serious])
        assert tab.evaluate("document.documentElement.scrollWidth") <= width  # only parts scroll sideways

"""Test the pages in headless Chromium, opened from disk with the network off."""

import re
import shutil
import subprocess
import tarfile

import pytest
import torch

import clearhead
from clearhead.course import book_page
from clearhead.inspection.document import sandboxed_frame
from clearhead.inspection.head_ranking import HeadSelection
from clearhead.inspection.page import render_page
from clearhead.inspection.page_data import thumbnails
from tests.inspection.fake_views import causal_view, cross_view, random_lens
from tests.inspection.page_reader import assert_scores_are_rounded, assert_weights_are_rounded

pytestmark = pytest.mark.slow

LENGTH = 12


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright, which drives the browser, is not installed"
    )
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """Return the source of axe-core, downloaded by npm into a temporary folder."""
    folder = tmp_path_factory.mktemp("axe")
    if shutil.which("npm") is None:
        pytest.skip("npm, which downloads axe-core, is not installed")
    fetched = subprocess.run(["npm", "pack", "axe-core@4"], cwd=folder, capture_output=True, timeout=120, check=False)
    packages = list(folder.glob("*.tgz"))
    if fetched.returncode or not packages:
        pytest.skip("npm could not download axe-core")
    with tarfile.open(packages[0]) as archive:
        return archive.extractfile("package/axe.min.js").read().decode("utf-8")


@pytest.fixture
def opened(chromium, tmp_path):
    """Yield a function that opens HTML from disk; assert that there were no console messages and no requests."""
    contexts, events = [], []

    def open_page(html, fragment="", **options):
        (tmp_path / "page.html").write_text(html, encoding="utf-8")
        context = chromium.new_context(**({"offline": True, "viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: events.append(message.text))
        tab.on("pageerror", lambda error: events.append(str(error)))
        tab.on("request", lambda request: events.extend(outside_addresses(request.url)))
        tab.on("dialog", lambda dialog: events.append("dialog"))
        tab.goto((tmp_path / "page.html").as_uri() + fragment)
        if tab.locator("#arrays").count():  # the page is shown after its arrays are decompressed
            tab.locator("#thumbnails button").first.wait_for()
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert events == []


def outside_addresses(address):
    return [] if address.startswith(("file:", "data:")) else [address]


@pytest.fixture
def view():
    return causal_view(length=LENGTH, num_layers=3, num_heads=4)


def readout(tab):
    """Return query, key, score, whether it is masked, and weight as displayed in the readout."""
    text = tab.locator("#readout").text_content()
    match = re.fullmatch(r"query (\d+) “.*” → key (\d+) “.*”: score (\S+?)(, masked)?, weight (\S+)", text, re.DOTALL)
    assert match, text
    query, key, score, masked, weight = match.groups()
    return int(query), int(key), number(score), masked is not None, number(weight)


def number(text):
    return float(text.replace("−", "-").replace("<0.001", "0.0002"))


def rounded(value, unit):
    """Return what a displayed number may be: its rounding to 8 bits and to the displayed digits is at most `unit`."""
    return pytest.approx(float(value), abs=unit)


def point_at(tab, row, column):
    """Move the pointer to the center of a cell."""
    geometry = tab.evaluate("geometry")
    x, y = (geometry[side] + (index + 0.5) * geometry["cell"] for side, index in (("left", column), ("top", row)))
    tab.locator("#matrix").hover(position={"x": x, "y": y})


def test_the_readout_shows_the_values_under_the_pointer(opened, view):
    tab = opened(render_page([view], "title", selection=HeadSelection(0, 0)))
    matrices = view.matrices(0, None)
    for row in range(0, LENGTH, 3):
        for column in range(0, LENGTH, 2):
            point_at(tab, row, column)
            query, key, score, masked, weight = readout(tab)
            assert (query, key) == (row, column)
            assert score == rounded(matrices.scores[0, row, column], 0.1)
            assert weight == rounded(matrices.weights[0, row, column], 0.01)
            assert masked == (column > row)


def test_the_page_of_a_real_model_shows_the_values_of_its_trace(opened, stories15m):
    traced = clearhead.load(stories15m, dtype="float32").trace("Once upon a time there was a little girl")
    tab = opened(render_page(traced.attention_views(), "title"))
    for layer, head, row, column in ((0, 0, 8, 3), (3, 5, 7, 0), (5, 2, 4, 4)):
        tab.get_by_label(f"layer {layer}, head {head}", exact=True).click()
        tab.locator("#matrix").focus()
        for key, times in (("PageUp", 1), ("Home", 1), ("ArrowDown", row), ("ArrowRight", column)):
            for _ in range(times):
                tab.keyboard.press(key)
        query, key, score, masked, weight = readout(tab)
        assert (query, key, masked) == (row, column, False)
        assert score == rounded(traced.scores(layer, head)[row, column], 0.1)
        assert weight == rounded(traced.attention(layer, head)[row, column], 0.01)


def test_a_click_and_the_arrow_keys_select_a_head(opened, view):
    tab = opened(render_page([view], "title"))
    tab.get_by_label("layer 2, head 1", exact=True).click()
    assert "layer 2, head 1" in tab.locator("#head-heading").text_content()
    row, column, _, _, weight = readout(tab)
    assert weight == rounded(view.matrices(2, None).weights[1, row, column], 0.01)
    tab.keyboard.press("ArrowUp")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    assert "layer 1, head 3" in tab.locator("#head-heading").text_content()
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == "layer 1, head 3"


def test_the_arrow_keys_select_a_cell(opened, view):
    tab = opened(render_page([view], "title"), fragment=f"#0/1/2/weights/{LENGTH - 1}/0")
    tab.locator("#matrix").focus()
    for key in ("ArrowUp", "ArrowRight", "ArrowRight"):
        tab.keyboard.press(key)
    query, key, score, _, weight = readout(tab)
    assert (query, key) == (LENGTH - 2, 2)
    assert score == rounded(view.matrices(1, None).scores[2, query, key], 0.1)
    assert weight == rounded(view.matrices(1, None).weights[2, query, key], 0.01)
    for name in ("next query", "previous key"):
        tab.get_by_label(name).click()
    assert readout(tab)[:2] == (LENGTH - 1, 1)


def test_the_table_shows_score_masked_score_and_weight(opened, view):
    tab = opened(render_page([view], "title"), fragment="#0/0/0/weights/5/0")
    matrices = view.matrices(0, None)
    rows = tab.locator("#row tr").all()
    assert len(rows) == LENGTH
    weights = []
    for column, row in enumerate(rows):
        _, score, masked, weight = row.locator("td").all_text_contents()
        assert number(score) == rounded(matrices.scores[0, 5, column], 0.1)
        assert masked == (score if column <= 5 else "−∞")
        weights.append(number(weight))
    assert torch.tensor(weights).sum().item() == pytest.approx(1, abs=0.02)


def pixel(tab, row, column):
    """Return the color drawn in a corner of a cell."""
    script = """([row, column]) => {
      const { cell, left, top } = geometry;
      const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
      copy.drawImage(document.getElementById("matrix"), -left - column * cell - 2, -top - row * cell - 2);
      return [...copy.getImageData(0, 0, 1, 1).data];
    }"""
    return tuple(tab.evaluate(script, [row, column])[:3])


def test_the_steps_are_drawn_as_scores_mask_and_weights(opened, view):
    tab = opened(render_page([view], "title"))
    gray = (232, 226, 217)
    tab.get_by_label("scores", exact=True).check()
    assert pixel(tab, 0, 5) != gray
    tab.get_by_label("after the mask", exact=True).check()
    assert pixel(tab, 0, 5) == gray
    tab.get_by_label("weights (softmax)", exact=True).check()
    assert pixel(tab, 0, 5) == gray
    assert pixel(tab, 0, 0) == (6, 38, 77)  # weight 1: the end of the ramp


def test_a_view_without_scores_has_no_steps_and_no_lens(opened, view):
    tab = opened(render_page([view, cross_view()], "title", lens=random_lens(view)))
    assert tab.locator("#lens").is_visible()
    tab.get_by_label("cross-attention").check()
    assert "cross-attention, layer" in tab.locator("#head-heading").text_content()
    assert not tab.locator("#steps").is_visible()
    assert not tab.locator("#lens").is_visible()


def test_the_lens_follows_the_query(opened, view):
    lens = random_lens(view)
    tab = opened(render_page([view], "title", lens=lens), fragment="#0/0/0/weights/4/0")
    first = tab.locator("#lens-rows tr").first.locator("td").first
    probability = float(lens.probabilities[-1, 4, 0])
    assert first.text_content().endswith(f"{100 * probability:.1f} %")
    tab.get_by_label("most likely token at every position").check()
    shown = tab.locator("#lens-rows tr").first.locator("td small").all_text_contents()
    assert shown == [f"{100 * float(probability):.1f} %" for probability in lens.probabilities[-1, :, 0]]


def test_the_address_restores_the_selection(opened, view):
    tab = opened(render_page([view], "title"), fragment="#0/2/3/scores/7/1")
    assert "layer 2, head 3" in tab.locator("#head-heading").text_content()
    assert readout(tab)[:2] == (7, 1)
    assert tab.get_by_label("scores", exact=True).is_checked()


def test_tokens_are_displayed_as_text_and_never_run(opened):
    view = causal_view(length=LENGTH)
    tab = opened(render_page([view], "<img src=x onerror=alert(1)>"))
    assert tab.locator("img").count() == 0
    assert tab.locator("h1").text_content() == "<img src=x onerror=alert(1)>"
    assert "<img␣onerror=alert(1)>" in tab.locator("#text").text_content()


def test_the_notebook_frame_works_inside_another_page(opened, view):
    frame = sandboxed_frame(render_page([view], "title"), height_pixels=800)
    tab = opened(f"<!DOCTYPE html><title>notebook</title>{frame}")
    inner = tab.frame_locator("iframe")
    inner.get_by_label("layer 1, head 1", exact=True).click()
    assert "layer 1, head 1" in inner.locator("#head-heading").text_content()


def test_a_page_of_512_tokens_responds_within_a_second(opened):
    view = causal_view(length=512, num_layers=30, num_heads=9)
    tab = opened(render_page([view], "title"))
    seconds = tab.evaluate("""() => {
      const start = performance.now();
      document.querySelector('[aria-label="layer 1, head 2"]').click();
      return (performance.now() - start) / 1000;
    }""")
    assert seconds < 1
    layer, head = tab.evaluate("""() => {
      const layer = data.views[0].layers.find((one) => one.full.length < one.num_heads);
      return [layer.number, Array.from(Array(9).keys()).find((head) => !layer.full.includes(head))];
    }""")
    tab.get_by_label(f"layer {layer}, head {head}", exact=True).click()
    assert f"--layer {layer}" in tab.locator("#readout").text_content()


def test_the_script_decodes_the_rounded_matrices(opened, view):
    views = [view, cross_view()]
    tab = opened(render_page(views, "title"))
    for number, each in enumerate(views):
        for layer, head in ((0, 1), (1, 0)):
            script = """(place) => { Object.assign(state, place); const { weights, scores } = currentMatrices();
                        return [[...weights], scores && [...scores]]; }"""
            weights, scores = tab.evaluate(script, {"view": number, "layer": layer, "head": head})
            exact = each.matrices(layer, None)
            shape = len(each.rows), len(each.columns)
            assert_weights_are_rounded(torch.tensor(weights).reshape(shape).numpy(), exact.weights[head].numpy())
            if exact.scores is not None:
                assert_scores_are_rounded(torch.tensor(scores).reshape(shape).numpy(), exact.scores[head].numpy())


@pytest.mark.parametrize("length", [12, 50, 150])
def test_thumbnails_of_the_script_equal_max_pooling(opened, length):
    view = causal_view(length=length, num_layers=1, num_heads=2)
    tab = opened(render_page([view], "title"))
    script = """() => { const { width, height, intensityAt } = thumbnailOf(data.views[0], data.views[0].layers[0], 1);
                return Array.from({ length: width * height }, (_, cell) => 255 * intensityAt(cell)); }"""
    expected = thumbnails(view.matrices(0, None).weights)[1].flatten()
    assert torch.tensor(tab.evaluate(script)) == pytest.approx(expected.float(), abs=2)


def test_the_page_says_why_it_opens_on_a_head_and_links_to_the_next(opened, view):
    html = render_page([view], "title")
    tab = opened(html)
    ranking = tab.evaluate("data.ranking")
    heading, reason = tab.locator("#head-heading"), tab.locator("#reason")
    assert f"layer {ranking[0]['layer']}, head {ranking[0]['head']}" in heading.text_content()
    assert reason.text_content().startswith(
        f"{100 * ranking[0]['specific']:.0f} % of this head’s attention is specific"
    )
    assert "the largest specific share of 12 heads, so the page opens here" in reason.text_content()
    buttons = tab.locator("#ranking button")
    assert buttons.count() == 5
    buttons.nth(1).click()
    assert f"layer {ranking[1]['layer']}, head {ranking[1]['head']}" in heading.text_content()
    assert "number 2 of 12 heads" in reason.text_content()
    assert readout(tab)[:2] == (ranking[1]["row"], ranking[1]["column"])


def test_no_number_has_six_digits(opened, view):
    tab = opened(render_page([view, cross_view()], "title", lens=random_lens(view)))
    for label in ("scores", "after the mask", "weights (softmax)", "most likely token at every position"):
        tab.get_by_label(label, exact=True).check()
        assert not re.search(r"\d[\d.,]{5,}\d", tab.locator("body").inner_text())


@pytest.mark.parametrize(("width", "interval"), [(1280, 1), (400, 3)])
def test_axis_labels_can_be_read_at_70_tokens(opened, width, interval):
    tab = opened(render_page([causal_view(length=70)], "title"), viewport={"width": width, "height": 900})
    assert tab.evaluate("labelInterval()") == interval
    assert tab.evaluate("labelInterval() * geometry.cell") >= 10
    assert tab.evaluate("labelSize()") >= 10
    box = tab.locator("#matrix").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width


@pytest.mark.parametrize("length", [8, 70, 200])
def test_a_phone_scrolls_down_only_and_has_targets_for_fingers(opened, length):
    view = causal_view(length=length, num_layers=4, num_heads=9)
    page = render_page([view, cross_view()], "title", lens=random_lens(view))
    tab = opened(page, viewport={"width": 400, "height": 800}, has_touch=True, is_mobile=True)
    assert tab.evaluate("document.documentElement.scrollWidth") == 400
    box = tab.locator("#matrix").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 400
    for selector, size in (("#ranking button", 44), ("#arrows button", 44), ("fieldset label", 44), (".thumbnail", 38)):
        boxes = [one.bounding_box() for one in tab.locator(selector).all() if one.is_visible()]
        assert boxes
        assert min(box["height"] for box in boxes) >= size
        assert min(box["width"] for box in boxes) >= size
    tab.get_by_label("layer 3, head 8", exact=True).tap()
    assert 0 <= tab.locator("#head-heading").bounding_box()["y"] < 400


def test_a_matrix_with_more_cells_than_pixels_is_max_pooled(opened):
    view = causal_view(length=600, num_layers=1, num_heads=1)
    view.matrices(0, None).weights.zero_()[0, 400, 100] = 1.0
    tab = opened(render_page([view], "title"), viewport={"width": 400, "height": 800})
    script = """() => {
      const { cell, left, top } = geometry;
      const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
      const [x, y] = [Math.round(left + 100 * cell), Math.round(top + 400 * cell)];
      copy.drawImage(document.getElementById("matrix"), 2 - x, 2 - y);
      return [...copy.getImageData(0, 0, 5, 5).data].filter((_, channel) => channel % 4 === 0);
    }"""
    assert tab.evaluate("geometry.cell") < 1
    assert min(tab.evaluate(script)) < 60  # red of the darkest color: 6


def test_a_frame_that_is_hidden_at_first_shows_the_page_later(opened, view):
    frame = sandboxed_frame(render_page([view], "title"), height_pixels=800)
    tab = opened(f'<!DOCTYPE html><title>notebook</title><div id="cell" style="width:0">{frame}</div>')
    inner = tab.frame_locator("iframe")
    inner.locator("#thumbnails button").first.wait_for(state="attached")
    tab.evaluate("document.getElementById('cell').style.width = '900px'")
    inner.get_by_label("layer 1, head 1", exact=True).click()
    assert inner.locator("#matrix").bounding_box()["width"] > 300


def test_a_browser_that_cannot_decompress_is_told_so(opened, view):
    tab = opened("<!DOCTYPE html><title>empty</title>")
    tab.add_init_script("delete window.DecompressionStream")
    address = tab.url
    with open(address.removeprefix("file://"), "w", encoding="utf-8") as file:
        file.write(render_page([view], "title"))
    tab.goto(address)
    tab.locator("#problem").wait_for()
    assert "This browser cannot read the numbers" in tab.locator("#problem").text_content()
    assert not tab.locator("main").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_no_serious_accessibility_violation(opened, axe, scheme, width):
    view = causal_view(length=150, num_layers=12, num_heads=9)  # long enough for every element to scroll
    pages = {"trace": render_page([view, cross_view()], "title", lens=random_lens(view)), "book": book_page()}
    for name, html in pages.items():
        tab = opened(html, color_scheme=scheme, viewport={"width": width, "height": 900})
        tab.evaluate(axe)
        violations = tab.evaluate("async () => (await axe.run()).violations")
        serious = [each for each in violations if each["impact"] in ("serious", "critical")]
        assert not serious, (name, [(each["id"], each["nodes"][0]["html"]) for each in serious])
        assert (
            tab.evaluate("document.documentElement.scrollWidth") <= width
        )  # only elements inside the page scroll sideways

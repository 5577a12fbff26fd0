"""The page in headless Chromium against a real server: every view by mouse and keyboard, and nothing from outside."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from clearhead.inspection import attribute_logit
from tests.inspection.test_page_browser import axe, chromium  # noqa: F401
from tests.page.models import HOSTILE, hostile_model

TEXT = "abc abc"
TIMEOUT = 60_000  # milliseconds; the machine may be busy
EXPECTED = "Failed to load resource: the server responded with a status of 503"  # only in the test without a model
VIEWS = {
    "chat": ".welcome",
    "tokens": "#token-table",
    "attention": ".matrix canvas",
    "lens": ".lens-table table",
    "circuit": ".parts",
    "cost": ".facts",
    "engine": ".pages span",
    "runs": ".chart",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Yield the address of a server with a toy model and one training run."""
    runs = tmp_path_factory.mktemp("runs")
    (runs / "first").mkdir()
    rows = [{"step": step, "loss": 3 / step, "learning_rate": 1e-3, "gradient_norm": 1.0} for step in range(1, 30)]
    (runs / "first" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (runs / "first" / "sample.txt").write_text(HOSTILE, encoding="utf-8")
    command = [sys.executable, "-m", "tests.page.serve_toy", str(runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            yield re.search(r"http://\S+", process.stdout.readline())[0]
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture
def opened(chromium, server):  # noqa: F811
    """Yield a function that opens a path of the page; assert that nothing failed and nothing came from outside."""
    contexts, events = [], []

    def open_page(path="", **options):
        context = chromium.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        context.set_default_timeout(TIMEOUT)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: message.text.startswith(EXPECTED) or events.append(message.text))
        tab.on("pageerror", lambda error: events.append(str(error)))
        tab.on("request", lambda request: request.url.startswith((server, "blob:")) or events.append(request.url))
        tab.on("dialog", lambda dialog: events.append("dialog"))
        tab.goto(f"{server}/{path}")
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert events == []


def metric(server, name):
    text = urllib.request.urlopen(f"{server}/metrics", timeout=10).read().decode()
    return float(re.search(rf"^clearhead_{name} (\S+)", text, re.MULTILINE)[1])


def answer_a_message(tab, text="Hello", tokens=24):
    tab.evaluate(f"localStorage.setItem('clearhead-settings', JSON.stringify({{maxTokens: {tokens}, seed: 5}}))")
    tab.reload()
    tab.locator("#message").fill(text)
    tab.keyboard.press("Enter")
    tab.locator("#send:not(.stop)").wait_for()
    tab.locator(".stats", has_text="length limit").wait_for()


def serious_findings(tab, axe):  # noqa: F811
    tab.evaluate(axe)
    found = tab.evaluate("axe.run().then((result) => result.violations)")
    return [(one["id"], one["nodes"][0]["html"][:200]) for one in found if one["impact"] in ("serious", "critical")]


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_opens_and_fits(opened, view, width):
    tab = opened(f"#/{view}?text={TEXT}", viewport={"width": width, "height": 860})
    tab.locator(VIEWS[view]).first.wait_for()
    assert tab.locator(".error:visible").count() == 0
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_serious(opened, axe, view, scheme):  # noqa: F811
    tab = opened(f"#/{view}?text={TEXT}", color_scheme=scheme)
    tab.locator(VIEWS[view]).first.wait_for()
    tab.wait_for_load_state("networkidle")
    assert serious_findings(tab, axe) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_an_answer_and_in_the_tour(opened, axe, scheme):  # noqa: F811
    tab = opened(color_scheme=scheme)
    answer_a_message(tab)
    tab.locator(".tok").nth(3).hover()
    tab.locator("#popover .candidate").first.wait_for()
    assert serious_findings(tab, axe) == []
    tab.goto(tab.url.split("#")[0] + "#/circuit?example=names&tour=0")
    tab.locator("#coach").wait_for()
    tab.locator(".parts").first.wait_for()
    assert serious_findings(tab, axe) == []


def test_views_are_reached_by_keyboard(opened):
    tab = opened(f"#/tokens?text={TEXT}")
    tab.locator("#token-table").wait_for()
    tab.locator("#tabs a", has_text="Attention").focus()
    tab.keyboard.press("Enter")
    tab.locator("#head-title").wait_for()
    tab.locator(".head-grid").focus()
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowRight")
    layer, head = map(int, re.findall(r"\d+", tab.locator("#head-title").text_content()))
    tab.wait_for_url(lambda url: f"layer={layer}&head={head}" in url, wait_until="commit")
    tab.keyboard.press("Shift+ArrowUp")
    assert tab.locator("#head-title").text_content() == f"Layer {layer - 1}, head {head}"


def test_a_link_shows_the_same_head_and_its_number_is_that_of_the_api(opened):
    tab = opened(f"#/attention?text={TEXT}&layer=1&head=2&at=5&col=1&step=weights")
    readout = tab.locator(".readout", has_text="weight")
    readout.wait_for()
    weight = hostile_model().trace(TEXT).attention(1, 2)[5, 1].item()
    assert f"weight {100 * weight:.1f}%" in readout.text_content()
    assert tab.locator("#head-title").text_content() == "Layer 1, head 2"


def test_lens_and_circuit_show_the_numbers_of_the_api(opened):
    trace = hostile_model().trace(TEXT)
    tab = opened(f"#/lens?text={TEXT}&at=4&every=1")
    tab.locator(".lens-detail .value").first.wait_for()
    likeliest = trace.logits[4].softmax(dim=-1).max().item()
    assert tab.locator(".lens-detail .value").first.text_content() == f"{100 * likeliest:.2f}%"
    tab = opened(f"#/circuit?text={TEXT}&token=98&at=4")
    logit = trace.logits[4, 98].item()
    sign = "−" if logit < 0 else "+"
    tab.get_by_text(f"is {sign}{abs(logit):.2f}; the largest parts").wait_for()
    part = next(
        one for one in attribute_logit(trace, 98, 4, by_head=True).contributions if (one.layer, one.head) == (1, 2)
    )
    title = tab.locator(".part[title^='layer 1 head 2']").get_attribute("title")
    assert title.endswith(f"{'−' if part.logit < 0 else '+'}{abs(part.logit):.3f}")


def test_the_steps_of_a_head_change_the_picture(opened):
    tab = opened(f"#/attention?text={TEXT}&layer=1&head=2")
    pictures = set()
    for name in ("1 Scores", "2 Mask", "3 Softmax"):
        tab.get_by_role("radio", name=name).click()
        tab.wait_for_timeout(700)
        pictures.add(tab.evaluate("document.querySelector('.matrix canvas').toDataURL()"))
    assert len(pictures) == 3


def test_an_answer_streams_branches_and_opens_elsewhere(opened):
    tab = opened()
    answer_a_message(tab)
    tokens = tab.locator(".tok")
    assert tokens.count() == 24
    tokens.nth(3).hover()
    tab.locator("#popover .candidate").first.wait_for()
    before = [token.text_content() for token in tokens.all()[:3]]
    tab.locator("#popover .candidate:not(.chosen)").first.click()
    tab.locator(".versions", has_text="2 of 2").wait_for()
    tab.locator(".stats", has_text="length limit").wait_for()
    assert [token.text_content() for token in tokens.all()[:3]] == before
    assert tab.locator(".tok.branched").count() == 1
    tab.get_by_role("button", name="Attention", exact=True).click()
    tab.locator("#head-title").wait_for()
    assert tab.locator("#strip .piece").count() == len("[user]Hello[assistant]") + 28


def test_alternatives_open_by_keyboard(opened):
    tab = opened()
    answer_a_message(tab)
    tab.locator(".tok").first.focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.activeElement.closest('#popover') !== null")
    tab.keyboard.press("Escape")
    assert tab.evaluate("document.activeElement.dataset.place") == "1"


def test_stop_ends_the_work_of_the_server(opened, server):
    tab = opened()
    tab.evaluate("localStorage.setItem('clearhead-settings', JSON.stringify({maxTokens: 4000, temperature: 0}))")
    tab.reload()
    tab.locator("#message").fill("Go on")
    tab.locator("#send").click()
    tab.locator(".tok").nth(2).wait_for()
    tab.locator("#send.stop").click()
    tab.locator(".stats", has_text="stopped").wait_for()
    count = tab.locator(".tok").count()
    deadline = time.monotonic() + 60
    while metric(server, "num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert metric(server, "num_requests_running") == 0
    assert count < 4000


def test_a_hostile_tokenizer_stays_inert(opened):
    model = hostile_model()
    token = model.tokenizer.unknown_id
    ids = ".".join(_base36(one) for one in [97, token, 98, token])
    for view in ("tokens", "attention", "lens", "circuit"):
        tab = opened(f"#/{view}?ids={ids}&token={token}")
        tab.locator(VIEWS[view]).first.wait_for()
        assert "onerror" in tab.locator("#strip").text_content()
        assert tab.locator("img[src=x]").count() == 0
    tab = opened("#/runs")
    tab.locator(".sample", has_text="onerror").wait_for()
    assert tab.locator("img[src=x]").count() == 0


def _base36(number):
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return digits[number] if number < 36 else _base36(number // 36) + digits[number % 36]


def test_the_tour_needs_no_model(opened):
    tab = opened()
    tab.route("**/inspect/**", lambda route: route.fulfill(status=503, body="{}"))
    tab.route("**/v1/**", lambda route: route.fulfill(status=503, body="{}"))
    tab.reload()
    tab.locator(".card").first.wait_for()
    assert tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") < 1000  # milliseconds
    tab.locator(".card").first.click()
    for _ in range(5):
        tab.locator("#coach").wait_for()
        assert tab.locator("main .error:visible").count() == 0
        tab.locator("#coach .primary").click()
        tab.wait_for_timeout(300)

"""Test the course in headless Chromium, opened from disk with the network off: controls by keyboard, no errors."""

import pytest

from clearhead.course import book_page
from tests.book.golden import golden_value
from tests.inspection.test_page_browser import axe, chromium, opened  # noqa: F401

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page():
    return book_page()


def test_the_temperature_slider_works_by_keyboard(opened, page):  # noqa: F811
    tab = opened(page)
    slider = tab.locator("#temperature-0")
    slider.focus()
    tab.keyboard.press("End")
    assert slider.get_attribute("aria-valuetext") == "100"
    shown = tab.locator("#widget-temperature text.value").all_text_contents()
    assert shown == [f"{weight:.4f}" for weight in golden_value("temperature", "weights")[-1]]
    tab.keyboard.press("Home")
    assert tab.locator("#widget-temperature text.value").all_text_contents() == ["1.0000", "0.0000", "0.0000", "0.0000"]
    heights = tab.locator("#widget-temperature rect.bar").evaluate_all(
        "all => all.map(each => each.height.baseVal.value)"
    )
    assert heights == [120, 0, 0, 0]


def test_a_common_shift_does_not_change_the_score_of_rope(opened, page):  # noqa: F811
    tab = opened(page)
    note = tab.locator("#widget-rope output")
    before = note.text_content().rpartition("= ")[2]
    tab.locator("#rope-1").focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    assert "key at 8" in note.text_content()
    assert note.text_content().rpartition("= ")[2] == before
    tab.locator("#rope-2").focus()
    tab.keyboard.press("ArrowRight")
    assert note.text_content().rpartition("= ")[2] != before


def test_the_mask_and_the_scale_can_be_chosen(opened, page):  # noqa: F811
    tab = opened(page)
    tab.locator("#mask-0").select_option(label="mask before the softmax")
    row = tab.locator("#widget-mask tbody tr").first.locator("td")
    assert row.all_text_contents() == ["1.000", *["0.000"] * 5]
    assert row.first.get_attribute("class") == "shade-20"
    tab.locator("#scaling-0").select_option(label="q·k / √d")
    assert float(tab.locator("#widget-scaling output").text_content().split("of ")[1].split(";")[0]) < 1.3
    tab.locator("summary", has_text="Answer").first.focus()
    tab.keyboard.press("Enter")
    assert tab.locator("#A1 details p").first.is_visible()


@pytest.mark.parametrize("width", [400, 1280])
def test_no_formula_is_cut_off(opened, page, width):  # noqa: F811
    """The parts of a formula wrap; none has to be scrolled."""
    tab = opened(page, viewport={"width": width, "height": 900})
    cut = "all => all.filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.textContent)"
    assert tab.locator(".formula").evaluate_all(cut) == []
    assert tab.locator(".formula math").count() > 60


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_axe_finds_no_serious_violation_with_all_answers_open(opened, axe, page, scheme, width):  # noqa: F811
    tab = opened(page, color_scheme=scheme, viewport={"width": width, "height": 900})
    tab.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    tab.evaluate(axe)
    violations = tab.evaluate("async () => (await axe.run()).violations")
    serious = [each for each in violations if each["impact"] in ("serious", "critical")]
    assert not serious, [(each["id"], each["nodes"][0]["html"]) for each in serious]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width

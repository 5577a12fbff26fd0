"""Build the site of docs/ strictly, and check its reference, its links to the book and what it refuses."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer

import clearhead
from clearhead.cli.app import app
from tests.inspection.test_page_browser import axe, chromium  # noqa: F401

pytest.importorskip("sphinx", reason="the extra docs is not installed")
ROOT = Path(__file__).parents[2]
BUILD = ROOT / "docs" / "site" / "build.py"


class Page(HTMLParser):
    """Collect the anchors and the local links of a page."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors.add(found.get("id"))
        address = found.get("href") if tag == "a" else found.get("src")
        if address and not re.match(r"\w+:", address):
            self.links.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, BUILD, "--out", folder], cwd=folder, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_link_of_the_site_leads_to_a_page_and_an_anchor(site):
    """Sphinx checks references between pages; this checks the HTML it wrote."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert len(pages) > 25
    for path, page in pages.items():
        for link in page.links:
            address, _, anchor = link.partition("#")
            target = (path.parent / address.partition("?")[0]).resolve() if address else path
            assert target.exists(), (path.name, link)
            if anchor and target in pages:
                assert anchor in pages[target].anchors, (path.name, link)


def test_the_reference_has_every_public_name_and_every_command(site):
    api = (site / "docs" / "reference" / "api.html").read_text(encoding="utf-8")
    assert [name for name in clearhead.__all__ if f"<h2>{name}<" not in api] == []
    cli = (site / "docs" / "reference" / "cli.html").read_text(encoding="utf-8")
    commands = typer.main.get_command(app).commands
    assert [name for name in commands if f"clearhead {name}" not in cli] == []
    assert "--max-new-tokens" in cli


def test_the_reference_is_typeset_and_not_cut_off(site):
    api = (site / "docs" / "reference" / "api.html").read_text(encoding="utf-8")
    assert re.search(r"<li><p><code[^>]*><span class=\"pre\">beams</span></code>: number of beams", api)
    assert re.search(r"<span class=\"pre\">temperature=0.0</span></code>: 0 takes the most likely token", api)
    blocks = [re.sub(r"<[^>]+>", "", block) for block in re.findall(r"<pre[^>]*>(.*?)</pre>", api, re.DOTALL)]
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 120
    assert not [block for block in blocks if "(self" in block or "clearhead.model" in block]


def test_statements_cited_in_docstrings_link_to_the_book(site):
    book = Page((site / "docs" / "book.html").read_text(encoding="utf-8"))
    packages = Page((site / "docs" / "reference" / "packages.html").read_text(encoding="utf-8"))
    cited = {link.partition("#")[2] for link in packages.links if link.startswith("../book.html#")}
    assert len(cited) > 20
    assert {number.lower() for number in cited} <= {str(anchor).lower() for anchor in book.anchors}


def test_the_site_has_the_course_and_links_every_statement_to_its_lesson(site):
    book = Page((site / "docs" / "book.html").read_text(encoding="utf-8"))
    lessons = [link.partition("#")[2] for link in book.links if link.startswith("course.html#")]
    assert len(lessons) == len(set(lessons)) == 33
    index = Page((site / "docs" / "index.html").read_text(encoding="utf-8"))
    assert {"course.html", "reference/api.html", "reference/cli.html"} <= set(index.links)


def test_a_link_to_a_missing_file_fails_the_build(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BUILD.parent))
    import build

    (tmp_path / "page.md").write_text("[code](../src/none.py), [page](other.md)", encoding="utf-8")
    with pytest.raises(SystemExit, match="does not exist"):
        build.adapt_page(tmp_path / "page.md", tmp_path.parent)


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("name", ["index", "book", "reference/api", "tutorials/attention-to-llama4"])
def test_axe_finds_no_serious_violation_and_the_console_stays_empty(site, chromium, axe, name, width):  # noqa: F811
    context = chromium.new_context(offline=True, viewport={"width": width, "height": 900})
    tab, events = context.new_page(), []
    tab.on("console", lambda message: events.append(message.text))
    tab.on("pageerror", lambda error: events.append(str(error)))
    tab.goto((site / "docs" / f"{name}.html").as_uri())
    tab.evaluate(axe)
    violations = tab.evaluate("async () => (await axe.run({preload: false})).violations")  # preload needs a server
    serious = [each for each in violations if each["impact"] in ("serious", "critical")]
    scroll_width = tab.evaluate("document.documentElement.scrollWidth")
    context.close()
    assert not serious, [(each["id"], each["nodes"][0]["html"]) for each in serious]
    assert events == []
    assert scroll_width <= width

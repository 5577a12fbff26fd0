"""Build the site of docs/ with Sphinx, strictly: any broken link or unknown page is an error.

    python docs/site/build.py --out build/site

The pages are copied to a folder with the layout of the repository, so that the links between them work on the site as
they do in a checkout. Links to code become plain text there. The reference is generated from the code, and the course
of `clearhead book` is a page of the site.

Sphinx with MyST, because MkDocs has had no release since 2024, Material for MkDocs is no longer developed, and its
successor Zensical is still at version 0.0.
"""

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

from sphinx.cmd.build import build_main

from clearhead.course import book_page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))
OTHER_PAGES = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md")
NAVIGATION = {
    "Tutorials": (
        "tutorials/first-model",
        "tutorials/train-and-open",
        "tutorials/attention-to-llama4",
        "tutorials/serve-and-look",
    ),
    "How to": ("guide", "training", "evaluation", "serving", "interop", "page", "cost", "add-a-family"),
    "Reference": ("reference/api", "reference/cli", "reference/packages", "models", "book", "glossary"),
    "How it works": (
        "architecture",
        "engine",
        "fast-path",
        "/benchmarks/README",
        "/benchmarks/training",
        "/benchmarks/log",
    ),
    "What we promise": ("promises", "/SECURITY"),
    "The project": ("/README", "/CONTRIBUTING", "/CHANGELOG", "/tests/README"),
}
SITE_LINKS = {  # words of the first page that name pages which only the site has
    "The course of": '<a href="course.html">The course</a> of',
    "The Python API": "[The Python API](reference/api.md)",
    "the command line": "[the command line](reference/cli.md)",
}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
_STATEMENT = re.compile(r"^\| ([A-F]\d+) \|", re.MULTILINE)
_PATH_IN_TABLE = re.compile(r'(?<=<span class="pre">)[\w.]+/[\w./]+(?=</span></code></p></td>)')


def copy_pages(target: Path) -> None:
    """Copy every page and picture below the target, with the layout of the repository."""
    from reference import reference_pages

    shutil.copytree(ROOT / "docs", target / "docs", ignore=shutil.ignore_patterns("site", "*.sh"))
    for name in (*OTHER_PAGES, *(f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.md"))):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target / name)
    (target / "docs" / "reference").mkdir()
    for name, text in reference_pages().items():
        (target / "docs" / "reference" / name).write_text(text, encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name("conf.py"), target / "conf.py")
    (target / "_static").mkdir()
    shutil.copyfile(Path(__file__).with_name("site.css"), target / "_static" / "site.css")
    for path in target.rglob("*.md"):
        path.write_text(adapt_page(path, target), encoding="utf-8")


def adapt_page(path: Path, target: Path) -> str:
    """Return a page for the site: navigation on the first page, anchors in the book, and no links to code."""
    text = path.read_text(encoding="utf-8")

    def keep_or_name(link: re.Match[str]) -> str:
        label, address, _ = link.groups()
        page = (path.parent / address).resolve()
        if page.suffix == ".md" and page.is_file():
            return link[0]
        checkout = ROOT / page.relative_to(target.resolve())
        if not checkout.exists():
            raise SystemExit(f"{path.relative_to(target)}: {address} does not exist")
        return label

    text = _LINK.sub(keep_or_name, text)
    if path.name == "book.md":
        text = _STATEMENT.sub(r'| [\1]{#\1} <a href="course.html#\1">lesson</a> |', text)
    if path == target / "docs" / "index.md":
        for words, link in SITE_LINKS.items():
            if text.count(words) != 1:
                raise SystemExit(f"docs/index.md does not say {words!r} once, which becomes a link on the site")
            text = text.replace(words, link)
        for title, pages in NAVIGATION.items():
            text += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n"
    return text


def build(out: Path) -> int:
    """Build the site into a folder and return the exit code of Sphinx."""
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary).resolve() / "pages"
        source.mkdir()
        copy_pages(source)
        options = ["-q", "-W", "--keep-going", "-b", "html", "-d", f"{temporary}/doctrees"]
        code = build_main([*options, str(source), str(out)])
    for page in out.rglob("*.html"):
        page.write_text(make_accessible(page.read_text(encoding="utf-8")), encoding="utf-8")
    (out / "docs" / "course.html").write_text(book_page(), encoding="utf-8")
    index = '<!DOCTYPE html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=docs/index.html">'
    (out / "index.html").write_text(f"{index}<title>Clearhead</title>\n", encoding="utf-8")
    return code


def make_accessible(page: str) -> str:
    """Return a page whose code and tables scroll by keyboard and whose navigation headings have a level.

    Sphinx and its theme write neither, and a build into an existing folder may meet pages that have both. Paths in
    tables may be broken after a slash or an underscore, so that they leave room for the sentences beside them.
    """
    page = _PATH_IN_TABLE.sub(lambda path: re.sub("([/_])", r"\1<wbr>", path[0]), page)
    page = page.replace('<p class="caption" role="heading">', '<p class="caption" role="heading" aria-level="2">')
    page = page.replace("<pre>", '<pre tabindex="0">')
    return re.sub(r'<div class="(table-wrapper[^"]*)">', r'<div class="\1" tabindex="0">', page)


def main() -> int:
    """Parse the arguments and build."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="folder for the site")
    return build(parser.parse_args().out)


if __name__ == "__main__":
    sys.exit(main())

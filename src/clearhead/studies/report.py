"""The files of a study: picture.png, table.json and index.html, and one page that links all studies.

    write_result(run_study(load_study("mask")), Path("studies/mask")); write_site(results, Path("studies"))

Every page is one file that loads nothing: pictures are embedded.
"""

import base64
import html
import json
import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from clearhead.files import write_bytes, write_text
from clearhead.inspection import html_document
from clearhead.studies.pictures import draw_picture
from clearhead.studies.study import StudyResult, Table

_SITE_TITLE = "Studies of the Transformer"
_SITE_LEAD = (
    "Each study tests statements of the book on small networks, with several seeds. Clearhead trained the networks and "
    "computed every number when it wrote these pages."
)


def write_result(result: StudyResult, folder: Path) -> None:
    """Write picture.png, table.json and index.html into a folder, which is created if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    picture = draw_picture(result)
    write_bytes(folder / "picture.png", picture)
    write_text(folder / "table.json", json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n")
    write_text(folder / "index.html", _study_page(result, picture))


def write_site(results: Sequence[StudyResult], folder: Path) -> None:
    """Write index.html, which links the pages that `write_result` wrote into folder/NAME for each result."""
    pictures = [(folder / result.study.name / "picture.png").read_bytes() for result in results]
    sections = "\n".join(map(_summary_section, results, pictures))
    body = (
        f"<header><h1>{_SITE_TITLE}</h1><p>{_SITE_LEAD}</p></header>\n"
        f"<main>\n{sections}\n</main>\n"
        '<footer><p class="hint">Written by <code>clearhead study all</code>.</p></footer>'
    )
    write_text(folder / "index.html", html_document(_SITE_TITLE, body, styles=_styles()))


def _study_page(result: StudyResult, picture: bytes) -> str:
    """Return the page of one study: claim, set-up, result, explanation and limits."""
    study = result.study
    seeds = ", ".join(map(str, result.seeds))
    sections = [
        ("The claim", _paragraphs(study.claim)),
        ("What is done", _paragraphs(study.setup)),
        (
            "What comes out",
            f'<p class="verdict"><strong>{_conclusion(result)}</strong></p>\n{_image(result, picture)}\n'
            f"{_table(study.tabulate(result.measurements))}\n"
            f'<p class="hint">Means over the seeds {seeds}; in parentheses the smallest and the largest value. '
            "Bands and thin lines in the picture show the same range.</p>",
        ),
        ("Why", _paragraphs(study.explanation)),
        ("Limits", _paragraphs(study.limits)),
        (
            "Run it",
            f"<p><code>clearhead study {study.name}</code> took {result.seconds:.0f} s here. The code is "
            f"<code>src/clearhead/studies/{study.name}.py</code>; <code>table.json</code> beside this page has all "
            "numbers.</p>",
        ),
    ]
    statements = ", ".join(study.entry.statements)
    body = (
        f"<header><h1>{html.escape(study.entry.title)}</h1>"
        f'<p class="hint">Study “{study.name}”, statements {statements} of the book</p></header>\n<main>\n'
        + "\n".join(f"<section><h2>{title}</h2>\n{content}\n</section>" for title, content in sections)
        + "\n</main>"
    )
    return html_document(study.entry.title, body, styles=_styles())


def _summary_section(result: StudyResult, picture: bytes) -> str:
    """Return the section of one study on the page of all."""
    entry = result.study.entry
    heading = f"{html.escape(entry.title)} <small>{', '.join(entry.statements)}</small>"
    return (
        f'<section><h2 id="{entry.name}">{heading}</h2>\n<p>{_conclusion(result)}</p>\n'
        f"{_image(result, picture)}\n"
        f'<p><a href="{entry.name}/index.html">Read the study “{html.escape(entry.title)}”</a></p></section>'
    )


def _conclusion(result: StudyResult) -> str:
    """Return the verdict as a sentence in HTML, without the name of the study, which the page has as its title."""
    verdict = result.verdict.removeprefix(f"{result.study.name}: ")
    return html.escape(verdict[0].upper() + verdict[1:])


def _paragraphs(text: str) -> str:
    """Return paragraphs, which are separated by empty lines, as HTML with `code` and subscripts (s_ij, Σ_(k ≤ i))."""
    escaped = html.escape(text.strip(), quote=False)
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    marked = re.sub(r"\b([a-zA-ZΣ])_(?:\(([^)]+)\)|(\w{1,2})\b)", r"\1<sub>\2\3</sub>", marked)
    return "\n".join(f"<p>{' '.join(part.split())}</p>" for part in marked.split("\n\n"))


def _image(result: StudyResult, picture: bytes) -> str:
    """Return the picture as an embedded image whose description is the verdict; narrow screens scroll it."""
    content = base64.b64encode(picture).decode("ascii")
    return (
        f'<div class="scrollable picture" tabindex="0" role="region" aria-label="Picture of {result.study.name}">'
        f'<img src="data:image/png;base64,{content}" alt="{_conclusion(result)}"></div>'
    )


def _table(table: Table) -> str:
    """Return a table as HTML that scrolls on narrow screens, also with the keyboard."""
    heads = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in table.headings)
    rows = "\n".join(_table_row(row) for row in table.rows)
    return (
        '<div class="scrollable" tabindex="0" role="region" aria-label="Results">\n'
        f"<table><thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>\n</div>"
    )


def _table_row(row: Iterable[str]) -> str:
    name, *cells = (html.escape(text) for text in row)
    return f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _styles() -> str:
    return files("clearhead.studies").joinpath("assets", "study.css").read_text(encoding="utf-8")

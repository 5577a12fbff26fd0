"""The course as one HTML page that loads nothing.

    Path("course.html").write_text(book_page(), encoding="utf-8")

Every statement is a lesson: text, formula, worked numbers, a control where a number teaches, a question, the errata as
exercises, its study and its code. Markup is in assets/lesson.html and assets/page.html.
"""

import html
import json
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from string import Template

from clearhead.course.drawing import image
from clearhead.course.examples import worked_examples
from clearhead.course.mathml import inline_html, to_mathml
from clearhead.course.panels import part_html
from clearhead.course.parts import Example, read_asset
from clearhead.course.statements import Erratum, Part, Statement, read_errata, read_parts
from clearhead.course.widget_html import widget_data, widget_html
from clearhead.course.widgets import make_widgets
from clearhead.errors import ClearheadError
from clearhead.inspection import colors, html_document
from clearhead.studies import ENTRIES

_TITLE = "The Transformer, worked out"


def book_page(studies: Path | None = None) -> str:
    """Return the HTML page of the course.

    studies: the folder of `clearhead study all`, whose pictures and verdicts are included; None leaves them out.
    """
    parts, examples, errata = read_parts(), defaultdict(list), defaultdict(list)
    for example in worked_examples():
        examples[example.number.split(", ")[-1]].append(example)
    for erratum in read_errata():
        errata[erratum.statement].append(erratum)
    widgets = make_widgets()
    figures = _Figures(studies)
    sections = []
    for part in parts:
        lessons = []
        for statement in part.statements:
            number = statement.number
            widget = widget_html(statement.widget, widgets[statement.widget]) if statement.widget else ""
            lessons.append(_lesson(statement, examples[number], errata[number], widget, figures.of(number)))
        text = inline_html(part.text)
        sections.append(
            f'<section class="part" aria-labelledby="part-{part.letter}">\n<h2 id="part-{part.letter}">{part.letter}. '
            f"{html.escape(part.title)}</h2>\n<p>{text}</p>\n" + "\n".join(lessons) + "\n</section>"
        )
    body = Template(read_asset("page.html")).substitute(
        title=_TITLE, contents=_contents(parts), parts="\n".join(sections), glossary=_glossary()
    )
    styles = read_asset("course.css") + colors.shade_styles()
    return html_document(_TITLE, body, styles=styles, script=read_asset("course.js"), data=widget_data(widgets))


class _Figures:
    """The studies of each statement. A picture is shown once, and linked from other statements."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._shown: dict[str, str] = {}  # study -> the statement that shows its picture

    def of(self, number: str) -> str:
        """Return what the studies of a statement found, or how to run them."""
        return "\n".join(self._study(name, number) for name, entry in ENTRIES.items() if number in entry.statements)

    def _study(self, name: str, number: str) -> str:
        title = html.escape(ENTRIES[name].title)
        if self._folder is None:
            return f"<p>{title}: <code>clearhead study {name}</code></p>"
        if name in self._shown:
            return f'<p>{title}: <a href="#study-{name}">see {self._shown[name]}</a></p>'
        self._shown[name] = number
        verdict, picture = _read_study(self._folder / name)
        verdict = verdict.removeprefix(f"{name}: ")
        return (
            f'<figure class="study" id="study-{name}"><figcaption>{title}: {html.escape(verdict)}</figcaption>\n'
            f'<div class="scrollable" tabindex="0" role="group" aria-label="Picture: {title}">'
            f"{image(picture, verdict)}</div></figure>"
        )


def _read_study(folder: Path) -> tuple[str, bytes]:
    """Return the verdict and the picture that `clearhead study` wrote into a folder."""
    try:
        verdict = json.loads((folder / "table.json").read_text(encoding="utf-8"))["verdict"]
        return str(verdict), (folder / "picture.png").read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        raise ClearheadError(
            f"{folder} has no picture.png, or no table.json with a verdict; run: "
            f"clearhead study all --out {folder.parent}"
        ) from None


def _lesson(
    statement: Statement, examples: Sequence[Example], errata: Sequence[Erratum], widget: str, study: str
) -> str:
    """Return the section of one statement."""
    return Template(read_asset("lesson.html")).substitute(
        number=statement.number,
        title=inline_html(statement.title),
        text="\n".join(
            f"<p>{inline_html(' '.join(each.split()))}</p>" for each in statement.text.strip().split("\n\n")
        ),
        formulas="\n".join(
            f'<div class="formula" tabindex="0" role="group" aria-label="Formula">{_formula_parts(formula)}</div>'
            for formula in statement.formulas
        ),
        examples="\n".join(_example(example) for example in examples),
        widget=f"<h4>Try it</h4>\n{widget}" if widget else "",
        question=inline_html(statement.question),
        answer=inline_html(statement.answer),
        errata="\n".join(_erratum(erratum) for erratum in errata),
        study=study,
        code=f"src/clearhead/{statement.code}",
    )


def _formula_parts(formula: str) -> str:
    """Return the parts of a formula between wide spaces, each as MathML of its own, so that they wrap."""
    return "".join(to_mathml(part) for part in formula.split(r"\quad"))


def _example(example: Example) -> str:
    panels = "\n".join(part_html(part) for part in example.panels)
    return (
        f"<h4>{html.escape(example.title)}</h4>\n<p>{inline_html(example.explanation)}</p>\n"
        f'<div class="panels">\n{panels}\n</div>'
    )


def _erratum(erratum: Erratum) -> str:
    return (
        f'<div class="exercise"><p><strong>Spot the mistake.</strong> {inline_html(erratum.claim)}</p>\n'
        f"<details><summary>The mistake (erratum {erratum.number})</summary>"
        f"<p>{inline_html(erratum.mistake)}</p></details></div>"
    )


def _contents(parts: Sequence[Part]) -> str:
    """Return the table of contents."""
    items = []
    for part in parts:
        lessons = "".join(
            f'<li><a href="#{each.number}">{each.number} {html.escape(each.title)}</a></li>' for each in part.statements
        )
        items.append(
            f'<li><a href="#part-{part.letter}">{part.letter}. {html.escape(part.title)}</a><ul>{lessons}</ul></li>'
        )
    return "\n".join(items)


def _glossary() -> str:
    entries = tomllib.loads(read_asset("glossary.toml"))
    return "\n".join(f"<dt>{inline_html(word)}</dt><dd>{inline_html(text)}</dd>" for word, text in entries.items())

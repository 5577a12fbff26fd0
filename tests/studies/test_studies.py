"""Every study runs at smoke size, and in the slow tests at full size, where all seeds must confirm its conclusion."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import clearhead
from clearhead.errors import ClearheadError
from clearhead.studies import ENTRIES, load_study, run_study, write_result, write_site
from clearhead.studies.pictures import draw_picture, finish_axes
from clearhead.studies.study import Run, StudyResult

FOLDER = Path(clearhead.__file__).parent / "studies"
MAX_LINES = 150
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def smoke_results():
    """Return a function that runs a study at smoke size once for all tests."""
    results = {}

    def run(name):
        if name not in results:
            results[name] = run_study(load_study(name), first_seed=3, smoke=True)
        return results[name]

    return run


@pytest.mark.parametrize("name", ENTRIES)
def test_a_study_leaves_a_picture_a_table_and_a_page(name, smoke_results, tmp_path):
    result = smoke_results(name)
    write_result(result, tmp_path)
    assert (tmp_path / "picture.png").read_bytes().startswith(PNG_SIGNATURE)
    data = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))
    assert (data["study"], data["seeds"], data["smoke"]) == (name, [3], True)
    assert all(len(row) == len(data["table"]["headings"]) for row in data["table"]["rows"])
    assert len(data["measurements"]) == 1
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    assert not re.search(r'(?:src|href)="(?!data:)', page)  # the page loads nothing
    for heading in ("The claim", "What is done", "What comes out", "Why", "Limits", "Run it"):
        assert f"<h2>{heading}</h2>" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_all_seeds_of_a_study_confirm_its_conclusion(name):
    result = run_study(load_study(name))
    assert len(result.seeds) >= 3
    assert all(result.holds), result.verdict
    assert "\n" not in result.verdict
    assert draw_picture(result).startswith(PNG_SIGNATURE)


@pytest.mark.parametrize("name", ["mask", "order"])
def test_a_seed_gives_the_same_numbers_again(name, smoke_results):
    first, second = smoke_results(name).measurements, run_study(load_study(name), first_seed=3, smoke=True).measurements
    assert first == second


def test_another_seed_gives_other_numbers(smoke_results):
    other = run_study(load_study("mask"), first_seed=4, smoke=True).measurements[0]
    assert other["trained"] != smoke_results("mask").measurements[0]["trained"]


def test_pages_typeset_code_and_subscripts(smoke_results, tmp_path):
    for name in ("mask", "tables"):
        write_result(smoke_results(name), tmp_path / name)
    mask, tables = ((tmp_path / name / "index.html").read_text(encoding="utf-8") for name in ("mask", "tables"))
    assert "exp(s<sub>ij</sub>) / Σ<sub>k ≤ i</sub> exp(s<sub>ik</sub>)" in mask
    assert "<code>clearhead cost</code> prints" in tables
    assert "`" not in re.sub(r"<style>.*?</style>", "", mask + tables, flags=re.DOTALL)
    assert "<strong>Smoke run, too small" in mask  # a sentence, without the name of the study


def test_a_site_links_every_study(smoke_results, tmp_path):
    results = [smoke_results(name) for name in ENTRIES]
    for result in results[:2]:
        write_result(result, tmp_path / result.study.name)
    write_site(results[:2], tmp_path)
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    links = re.findall(r'href="([\w/.]+)"', page)
    assert links == [f"{result.study.name}/index.html" for result in results[:2]]
    assert all((tmp_path / link).is_file() for link in links)


def test_progress_covers_all_seeds():
    steps = []
    run_study(load_study("order"), smoke=True, progress=lambda *step: steps.append(step))
    assert steps == [
        ("order: without positions", 0, 3),
        ("order: with RoPE", 1, 3),
        ("order: with sinusoids", 2, 3),
    ]


def test_a_verdict_counts_the_seeds_that_agree(smoke_results):
    study = smoke_results("scale").study
    good = study.measure(Run(seed=0))
    bad = good | {"q·k": good["q·k"] | {"variance": [1.0] * len(good["q·k"]["variance"])}}  # as if it did not grow
    result = StudyResult(study, (0, 1, 2), False, [good, good, bad], 1.0)
    assert result.holds == [True, True, False]
    assert result.verdict.startswith("scale: the variance of q·k grows like d^")
    assert result.verdict.endswith("(2 of 3 seeds agree)")


def test_masking_after_the_softmax_would_hold_without_a_leak():
    """The study must not confirm its claim if masking after the softmax were honest, as the lecture suspects."""
    study, losses = load_study("mask"), {"before softmax": 1.386, "after, renormalized": 1.386}
    leak = {"after softmax": 0.09, "no mask": 0.09}
    honest = {"after softmax": 1.386, "no mask": 1.386}
    stepwise = losses | honest
    found = {"trained": losses | leak, "token_by_token": stepwise, "unrelated": stepwise, "difference": 1e-7}
    assert study.holds(found)
    assert not study.holds(found | {"trained": losses | honest})
    guesses = stepwise | {"no mask": 2.4}  # as if token by token they knew something of the next letter
    assert not study.holds(found | {"unrelated": guesses})
    assert study.holds(found | {"token_by_token": guesses, "unrelated": guesses})


def test_the_bottleneck_must_be_seen_to_be_concluded():
    study = load_study("bottleneck")
    cells = {"tanh RNN": 0.2, "GRU": 0.3, "LSTM": 0.4}
    last = cells | {f"{cell} + attention": 0.7 for cell in cells} | {"Transformer": 1.0}

    def holds(**changes):
        return study.holds({"accuracy": {name: [1.0, value] for name, value in (last | changes).items()}})

    assert holds()
    assert not holds(GRU=0.7)  # as if one state sufficed
    assert not holds(Transformer=0.65)
    assert not holds(**{"LSTM + attention": 0.45})  # as if attention did not help


def test_longer_texts_must_tell_position_encodings_apart():
    study = load_study("length")
    level, rising = [2.0] * 8, [2.0, 2.4, *[2.7] * 6]
    found = dict.fromkeys(("RoPE, dynamic", "RoPE, YaRN", "ALiBi", "relative (Gopher)"), level)
    found |= dict.fromkeys(("RoPE", "sinusoidal", "iRoPE", "NoPE"), rising)
    assert study.holds(found)
    for name in found:
        if name not in ("iRoPE", "NoPE"):  # the conclusion reports these two without a claim
            assert not study.holds(found | {name: rising if found[name] is level else level}), name


def test_pretraining_must_help_to_be_concluded():
    study = load_study("adapt")
    found = {"prompting": [0.2, 1.0], "curves": {"fine-tuning": [0.9], "LoRA": [0.8], "from scratch": [0.5]}}
    assert study.holds(found)
    assert not study.holds(found | {"prompting": [0.2, 0.6]})
    assert not study.holds(found | {"curves": found["curves"] | {"from scratch": [0.9]}})


def test_a_short_logarithmic_axis_has_round_labels():
    """Instead of the powers of 10, of which it contains one or none."""
    axes = Figure().subplots()
    axes.plot([30_000, 250_000], [1.9, 2.7])
    finish_axes(axes, title="loss", xscale="log", yscale="log", legend=False)
    axes.figure.canvas.draw()
    x, y = ([label.get_text() for label in axis.get_ticklabels()] for axis in (axes.xaxis, axes.yaxis))
    assert {"50,000", "100,000", "200,000"} <= set(x)
    assert {"2", "2.2", "2.4", "2.6"} <= set(y)


# --- files and names


def test_every_entry_has_a_module_and_every_module_of_a_study_an_entry():
    modules = {path.stem for path in FOLDER.glob("*.py") if "STUDY = Study(" in path.read_text(encoding="utf-8")}
    assert modules == set(ENTRIES)
    assert all(load_study(name).entry is entry for name, entry in ENTRIES.items())


@pytest.mark.parametrize("name", ENTRIES)
def test_a_study_is_one_short_file_with_its_command(name):
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_LINES
    assert ast.get_docstring(ast.parse(text)).endswith(f"clearhead study {name}")


def test_a_wrong_name_is_answered_without_torch():
    code = (
        "import sys\nfrom clearhead.errors import ClearheadError\nfrom clearhead.studies import load_study\n"
        "try: load_study('maks')\nexcept ClearheadError as error: print(error)\nsys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (
        0,
        "unknown study 'maks'; did you mean 'mask'? `clearhead study` lists all studies\n",
    )


def test_pictures_need_matplotlib(smoke_results, monkeypatch):
    result = smoke_results("scale")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ClearheadError, match=r'pip install "clearhead\[plot\]"'):
        draw_picture(result)

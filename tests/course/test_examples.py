"""Test the worked examples of the book: every number against the golden values, and against what is independent."""

import io
import json

import pytest
import torch
from rich.console import Console

from clearhead.api import load
from clearhead.course import generation_examples
from clearhead.course.examples import worked_examples
from clearhead.course.panels import book_data, panel_cells, print_book
from clearhead.course.parts import Panel
from tests.book.golden import golden, golden_value

EXAMPLES = {example.title: {panel.name: panel for panel in example.panels} for example in worked_examples()}

# title, panel, keys of its numbers in golden.json
PROJECTIONS, ONE_HEAD = "Queries, keys and values", "One head, from scores to output"
CACHE = "Decoding with a cache"
GOLDEN = [
    (PROJECTIONS, "q = x·W_q", ("qkv", "q")),
    (PROJECTIONS, "k = x·W_k", ("qkv", "k")),
    (PROJECTIONS, "v = x·W_v", ("qkv", "v")),
    (ONE_HEAD, "scores = q·kᵀ", ("qkv", "scores")),
    (ONE_HEAD, "weights = softmax(scores)", ("qkv", "weights")),
    (ONE_HEAD, "output = weights·v", ("qkv", "output")),
    ("Two keys and the scale", "scores = q·kᵀ / √d", ("thinking", "scores")),
    ("Two keys and the scale", "weights", ("thinking", "weights")),
    ("Alignment between decoder and encoder", "scores = s·h", ("cross_attention", "scores")),
    ("Alignment between decoder and encoder", "weights", ("cross_attention", "weights")),
    ("Alignment between decoder and encoder", "context c = Σ weight·h", ("cross_attention", "context")),
    ("The causal mask", "scores", ("masked_scores", "scores")),
    ("The causal mask", "weights", ("masked_scores", "causal_weights")),
    ("Heatmap A: uniform", "weights", ("heatmaps", "weights", "A")),
    ("Heatmap B: diagonal", "weights", ("heatmaps", "weights", "B")),
    ("Heatmap C: causal", "weights", ("heatmaps", "weights", "C")),
    ("Heatmap D: shifted", "weights", ("heatmaps", "weights", "D")),
    ("Temperature", "weights", ("temperature", "weights")),
    ("Sinusoidal positions", "encoding", ("sinusoidal", "table")),
    ("Counting without positions", "output", ("nope", "expected_first_column")),
    (CACHE, "outputs, token by token", ("kv_cache", "causal_scaled_output")),
    (CACHE, "outputs, in one pass", ("kv_cache", "causal_scaled_output")),
]


@pytest.mark.parametrize(("title", "panel", "keys"), GOLDEN)
def test_panels_equal_the_golden_values(title, panel, keys):
    values, expected = EXAMPLES[title][panel].values, golden(*keys)
    assert (values - expected.reshape(values.shape)).abs().max() <= 1e-12


def test_sinusoids_are_not_rounded_to_one():
    """The point of the example is that cos(1/100) is 0.99995 and not 1."""
    cells = panel_cells(EXAMPLES["Sinusoidal positions"]["encoding"])
    assert [str(cell) for cell in cells[1]] == ["0.841471", "0.540302", "0.00999983", "0.99995"]


def _attend(panels, x, memory, allowed=None):
    """Compute a head from the matrices that the page shows."""
    q, k, v = (tokens @ panels[name].values for tokens, name in ((x, "W_q"), (memory, "W_k"), (memory, "W_v")))
    return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=allowed)[0]


def test_three_uses_follow_from_the_inputs_on_the_page():
    panels = EXAMPLES["Three uses of one module"]
    x, states = panels["x"].values, panels["encoder states"].values
    causal = torch.ones(3, 3, dtype=torch.bool).tril()
    torch.testing.assert_close(panels["self: Attn(x, x)"].values, _attend(panels, x, x))
    torch.testing.assert_close(panels["causal self: Attn(x, x), masked"].values, _attend(panels, x, x, causal))
    torch.testing.assert_close(panels["cross: Attn(x, encoder states)"].values, _attend(panels, x, states))


def test_who_chased_whom_follows_from_the_inputs_on_the_page():
    panels = EXAMPLES["Who chased whom"]
    words, sinusoids = panels["words"].values, panels["sinusoids"].values
    names = panels["words"].rows
    for row, mean in zip(panels["mean output"].rows, panels["mean output"].values, strict=True):
        positions, sentence = row.split(": ")
        x = words[[names.index(word) for word in sentence.split()]] + (positions == "sinusoids") * sinusoids
        torch.testing.assert_close(mean, _attend(panels, x, x).mean(dim=0))


@pytest.mark.parametrize("name", ["A", "B", "C", "D"])
def test_heatmaps_use_the_scores_of_the_book(name):
    panels = next(panels for title, panels in EXAMPLES.items() if title.startswith(f"Heatmap {name}:"))
    assert torch.equal(panels["scores"].values, golden("heatmaps", "matrices", name))


def test_masking_after_the_softmax_leaves_rows_that_do_not_sum_to_one():
    sums = EXAMPLES["The causal mask"]["row sums"].values
    assert (sums[0] - 1).abs().max() <= 1e-12
    assert (sums[1] - golden("masked_scores", "row_sums_after")).abs().max() <= 1e-12


def test_receptive_field_and_key_projections_equal_the_golden_counts():
    field = EXAMPLES["Receptive field"]["inputs seen"].values
    assert field.tolist() == [
        golden_value("receptive_field", "size")[str(h)] for h in golden_value("receptive_field", "heads")
    ]
    counts = EXAMPLES["What a cache saves"]["key projections"].values
    assert counts[0].tolist() == golden_value("projections", "without_cache")
    assert counts[1].tolist() == golden_value("projections", "with_cache")


def test_the_cache_holds_the_keys_and_values_of_all_earlier_tokens():
    expected = torch.cat((golden("kv_cache", "k"), golden("kv_cache", "v")), dim=-1)
    for step in (1, 2, 3):
        assert torch.equal(EXAMPLES[CACHE][f"cache after token {step}"].values, expected[:step])


def test_masked_cells_have_their_own_class_and_minus_infinity():
    cells = panel_cells(EXAMPLES["Heatmap C: causal"]["weights"])
    assert [cell.page_class for cell in cells[0]] == [' class="shade-20"', *[' class="masked"'] * 3]
    assert [str(cell) for cell in panel_cells(EXAMPLES["Heatmap C: causal"]["scores"])[0]] == ["5", "−∞", "−∞", "−∞"]


def test_book_data_is_json_with_unrounded_numbers():
    data = json.loads(json.dumps(book_data(), allow_nan=False))
    weights = next(panel for panel in data[1]["panels"] if panel["name"].startswith("weights"))
    assert weights["values"] == EXAMPLES[ONE_HEAD]["weights = softmax(scores)"].values.tolist()


def test_print_book_prints_every_example():
    console = Console(file=io.StringIO(), width=160)
    print_book(console)
    assert all(title in console.file.getvalue() for title in EXAMPLES)
    assert "0.3333" in console.file.getvalue()


def test_print_book_truncates_no_number_at_80_columns():
    console = Console(file=io.StringIO(), width=80)
    print_book(console)
    assert "…" not in console.file.getvalue()


def test_the_cached_example_shows_all_of_its_inputs_and_steps():
    panels = EXAMPLES[CACHE]
    for name in ("x", "W_q", "W_k", "W_v"):
        assert torch.equal(panels[name].values, golden("kv_cache", name))
    q, k, expected = golden("kv_cache", "q"), golden("kv_cache", "k"), golden("kv_cache", "causal_scaled_weights")
    for step in range(3):
        assert torch.equal(panels[f"q of token {step + 1}"].values[0], q[step])
        scores = panels[f"scores of token {step + 1}: q·kᵀ/√2"].values[0]
        assert (scores - q[step] @ k[: step + 1].T / 2**0.5).abs().max() <= 1e-12
        weights = panels[f"weights of token {step + 1}"].values[0]
        assert (weights - expected[step, : step + 1]).abs().max() <= 1e-12


def test_the_feed_forward_example_equals_torch():
    panels = EXAMPLES["A feed-forward layer"]
    inner = torch.relu(panels["x"].values @ panels["W₁"].values + panels["b₁"].values)
    assert torch.equal(panels["ReLU(xW₁ + b₁)"].values, inner)
    assert torch.equal(panels["output"].values, inner @ panels["W₂"].values + panels["b₂"].values)


def test_scores_of_rope_depend_on_the_distance_only():
    rotated = EXAMPLES["Rotating one pair"]["rotated by position"].values
    assert (rotated[1:4, 4] - rotated[1, 4]).abs().max() <= 1e-12  # m - n = 2 in all three rows
    assert (rotated[:, 4] - rotated[:, 5]).abs().max() <= 1e-12  # as rotation, and as multiplication in C
    assert abs(rotated[4, 4] - rotated[1, 4]) > 0.1


def test_only_masking_first_and_renormalizing_hide_later_tokens():
    panels = [panel.values for panel in EXAMPLES["Who depends on whom"].values()][1:]
    later = [float(values.triu(1).abs().max()) for values in panels]
    assert later[0] == later[2] == 0
    assert min(later[1], later[3]) > 0.01
    assert torch.allclose(panels[0], panels[2])


def test_cost_tables_equal_what_the_counter_counted():
    """The formulas are the book's, the counts come from running the layer."""
    for title in ("The table for a sequence", "The table for one token"):
        for name, _, flops, counted_flops, _, moved, counted_moved in EXAMPLES[title]["one layer"].cells:
            assert (flops, moved) == (counted_flops, counted_moved), name


def test_kinds_of_attention_cost_what_the_counter_counted():
    """The counts are of the layers, the formulas of the page; multi-query saves 2nd²(1 − 1/h) of the projections."""
    rows = EXAMPLES["Four kinds of attention"]["multiply-accumulates"].cells
    assert [value for _, _, value, _ in rows] == [counted for *_, counted in rows]
    counted = {kind: int(count.replace(",", "")) for kind, *_, count in rows}
    n, d, h = 24, 32, 4
    assert counted["self, not causal"] - counted["multi-query"] == 2 * n * d * d * (h - 1) // h
    assert counted["self, not causal"] - counted["causal self"] == n * (n - 1) * d  # pairs that the mask forbids
    assert [formula for _, formula, *_ in rows][1:3] == ["2nd² + 2nd²/h + 2n²d", "2md² + 2nd² + 2nmd"]


def test_word_order_shows_only_with_positions():
    means = EXAMPLES["Who chased whom"]["mean output"].values
    assert (means[0] - means[1]).abs().max() <= 1e-12
    assert (means[2] - means[3]).abs().max() > 0.1


def test_multi_query_saves_what_the_book_says():
    counted, formula = EXAMPLES["Sharing keys and values"]["saved by multi-query"].values[0].tolist()
    assert counted == formula == 2 * 100 * 64**2 * 7


def test_every_matrix_has_as_many_labels_as_rows_and_columns():
    panels = [panel for example in EXAMPLES.values() for panel in example.values() if isinstance(panel, Panel)]
    assert len(panels) > 60
    for panel in panels:
        rows, columns = panel.values.shape
        assert len(panel.rows) in (0, rows), panel.name
        assert len(panel.columns) in (0, columns), panel.name


def test_examples_load_their_model_without_the_kernels(monkeypatch):
    """With the kernels, `clearhead book` would start the compiler on a new machine, and say so."""
    loaded = []
    monkeypatch.setattr(
        generation_examples, "load", lambda *args, **options: loaded.append(load(*args, **options)) or loaded[-1]
    )
    with torch.no_grad():
        generation_examples.generation_examples()
    assert [type(model.network.decoder).__name__ for model in loaded] == ["LayerStack"]

"""Worked examples of part B of the book: sinusoids, RoPE, relative positions and none (B1 to B5).

for example in position_examples(): print(example.title)
"""

import cmath

import torch
from torch import Tensor

from clearhead.architecture import Alibi, RelativeBuckets, Rope, SinusoidalPositions
from clearhead.course.parts import (
    NO_MASK,
    Chart,
    Example,
    Heatmap,
    Panel,
    Part,
    TextTable,
    causal_context,
    inputs,
    numbered,
    single_head,
    tensor,
)
from clearhead.model import (
    AttentionContext,
    alibi_bias,
    fused_attention,
    make_rotation,
    relative_position_bucket,
    sinusoids,
)

_QUERY, _KEY = (1.0, 0.0), (0.8, 0.6)  # one pair of entries each
_DISTANCES = tuple(range(0, 65, 2))


def position_examples() -> list[Example]:
    """Compute the examples of B1 to B5."""
    return [_sinusoidal(), _counter(), _rotation(), _relative(), _counting_without_positions(), _word_order()]


def _sinusoidal() -> Example:
    width, count = inputs("sinusoidal")["width"], inputs("sinusoidal")["num_positions"]
    table = sinusoids(torch.arange(count), width, SinusoidalPositions(), torch.float64)
    rows = [f"position {number}" for number in range(count)]
    columns = ("sin p", "cos p", "sin p/100", "cos p/100")
    picture = sinusoids(torch.arange(50), 130, SinusoidalPositions(), torch.float64)
    explanation = (
        "Each pair of entries has a sine and a cosine of the same angle; later pairs turn more slowly. Here d = 4, so "
        "the frequencies are 1 and 1/100. The picture shows 50 positions of width 130."
    )
    panels: list[Part] = [
        Panel("encoding", table, rows, columns, num_digits=6),
        Heatmap("sinusoids", picture, row_label="position", column_label="entry"),
    ]
    return Example("B1", "Sinusoidal positions", explanation, panels)


def _counter() -> Example:
    rows = [(str(number), *f"{number:03b}") for number in range(8)]
    explanation = "The last bit changes at every number, the one before at every second: slow and fast entries."
    table = TextTable("binary counting", ("number", "every 4", "every 2", "every 1"), rows)
    return Example("B1", "The intuition: a binary counter", explanation, [table])


def rotate(vector: Tensor, position: int, theta: float = 10000.0) -> Tensor:
    """Return a vector (H,) as RoPE rotates it at a position, with neighbors as pairs."""
    rotation = make_rotation(
        Rope(theta=theta, pairing="interleaved"), torch.tensor([[position]]), len(vector), vector.dtype
    )
    return rotation.rotate(vector[None, None, None])[0, 0, 0]


def _rotation() -> Example:
    q, k = tensor(_QUERY), tensor(_KEY)
    places = [(0, 0), (3, 1), (13, 11), (103, 101), (3, 2)]
    rows, numbers = [], []
    for m, n in places:
        turned_q, turned_k = rotate(q, m), rotate(k, n)
        as_complex = complex(*_QUERY) * cmath.exp(1j * m) * (complex(*_KEY) * cmath.exp(1j * n)).conjugate()
        rows.append(f"m = {m}, n = {n}")
        numbers.append([*turned_q.tolist(), *turned_k.tolist(), float(turned_q @ turned_k), as_complex.real])
    columns = ("q′", "q′", "k′", "k′", "q′·k′", "complex")
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(64, generator=generator, dtype=torch.float64)
    start = rotate(wide, 0)
    scores = [float(start @ rotate(wide, distance) / (wide @ wide)) for distance in _DISTANCES]
    panels: list[Part] = [
        Panel("q and k", torch.stack((q, k)), ("q", "k")),
        Panel("rotated by position", tensor(numbers), rows, columns),
        Chart("score of equal vectors, d = 64", _DISTANCES, {"q′·k′ / q·k": scores}, x_label="distance"),
    ]
    explanation = (
        "One pair of entries, ω = 1. The query at position m turns by m radians, the key at n by n. Rows with the same "
        "m − n have the same score: shifting both by 10 or 100 changes nothing. Multiplying complex numbers by e^(jm) "
        "gives the same."
    )
    return Example("B2", "Rotating one pair", explanation, panels)


def _relative() -> Example:
    count = 6
    distance = (torch.arange(count)[:, None] - torch.arange(count))[None]
    bias = alibi_bias(distance, 2, Alibi(), torch.float64)[0]
    allowed = torch.ones(count, count, dtype=torch.bool).tril()
    far = torch.tensor([[[0, 1, 2, 7, 15, 16, 20, 32, 64, 127, 500]]])
    buckets = relative_position_bucket(far, RelativeBuckets())[0].double()
    queries, keys = numbered("query", count), numbered("key", count)
    panels = [
        Panel("ALiBi, head 1 of 2: −distance/16", bias[0], queries, keys, "scores", allowed),
        Panel("T5: bucket of a distance", buckets, ("bucket",), [str(each) for each in far[0, 0].tolist()]),
    ]
    explanation = (
        "ALiBi subtracts a multiple of the distance from every score; the multiples of h heads are 2^(−8/h), "
        "2^(−16/h) and so on, here 1/16 and 1/256. Under the causal mask, only the lower triangle is used. T5 learns "
        "one number for each bucket and head: small distances have a bucket each, larger ones share buckets that grow."
    )
    return Example("B3", "Biases of the distance", explanation, panels)


def _counting_without_positions() -> Example:
    count, width = inputs("nope")["num_tokens"], 2
    x = torch.zeros(count, width, dtype=torch.float64)
    x[:, 0], x[0, 1] = 1.0, 1.0
    ones, zeros = torch.ones(width, width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)
    keys, values = zeros.clone(), zeros.clone()
    keys[0], values[1, 0] = 1.0, 1.0
    attention = single_head(ones, keys, values)
    output = attention(x[None], causal_context(count))[0]
    tokens = [f"t = {number}" for number in range(1, count + 1)]
    panels = [
        Panel("xᵀ: tokens side by side", x.T, ("every token", "first token"), tokens),
        Panel("W_k", keys),
        Panel("W_v", values),
        Panel("output", output[:, :1].T, ("1/t",), tokens),
    ]
    explanation = (
        "Every token has a 1 in its first entry, and only the first token in its second. All keys are (1, 1), so all "
        "scores of a row are equal, whatever W_q is. Only the first token has a nonzero value. Token t therefore gets "
        "the mean of t values, 1/t: it encodes the position although the input has no position encoding."
    )
    return Example("B4", "Counting without positions", explanation, panels)


def _word_order() -> Example:
    """Compare the mean output of a head for the same words in two orders, with and without sinusoids."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 4, 4, generator=generator, dtype=torch.float64).round(decimals=1)
    words = torch.randn(4, 4, generator=generator, dtype=torch.float64).round(decimals=1)
    attention = single_head(*weights)
    added = sinusoids(torch.arange(5), 4, SinusoidalPositions(), torch.float64)
    context = AttentionContext(NO_MASK, fused_attention, torch.arange(5)[None])
    orders = {"the man chased the dog": [0, 1, 2, 0, 3], "the dog chased the man": [0, 3, 2, 0, 1]}
    rows, means = [], []
    for name, positions in (("no positions", torch.zeros_like(added)), ("sinusoids", added)):
        for sentence, order in orders.items():
            rows.append(f"{name}: {sentence}")
            means.append(attention((words[order] + positions)[None], context)[0].mean(dim=0))
    explanation = (
        "A head with random weights reads two sentences of the same words, and its outputs are averaged. Without "
        "positions the averages are equal, so nothing after this layer can tell who chased whom. The sinusoids of B1 "
        "are added to the words in the order of each sentence. Scores are divided by √4 = 2."
    )
    panels = [
        Panel("words", words, ("the", "man", "chased", "dog")),
        *(Panel(name, matrix) for name, matrix in zip(("W_q", "W_k", "W_v"), weights, strict=True)),
        Panel("sinusoids", added, [f"position {position}" for position in range(5)], num_digits=6),
        Panel("mean output", torch.stack(means), rows),
    ]
    return Example("B5", "Who chased whom", explanation, panels)

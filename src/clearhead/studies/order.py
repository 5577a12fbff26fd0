"""Study: the order of words with and without positions; RoPE and sinusoids over distances (book A8, B1, B2, B5).

clearhead study order
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from clearhead.architecture import Bidirectional, Rope, SinusoidalPositions
from clearhead.model import Transformer, make_rotation, sinusoids
from clearhead.studies.catalog import ENTRIES
from clearhead.studies.numbers import mean, spread_table
from clearhead.studies.pictures import COLORS, Figure, bar_spread, finish_axes, plot_spread
from clearhead.studies.study import Measurements, Run, Study, Table
from clearhead.studies.toys import build, random_generator, toy_decoder

WIDTH, LENGTH = 64, 12
NUM_POSITIONS, TABLE_WIDTH = 50, 130  # the picture of the book
DISTANCES, SHIFTS = range(129), (0, 1, 10, 1000)
SENTENCES = ("the man chased the dog", "the dog chased the man")
NETWORKS = {
    "without positions": toy_decoder(vocab_size=16, width=WIDTH, pattern=Bidirectional()),
    "with RoPE": toy_decoder(vocab_size=16, width=WIDTH, pattern=Bidirectional(), position=Rope()),
    "with sinusoids": toy_decoder(vocab_size=16, width=WIDTH, pattern=Bidirectional(), position=SinusoidalPositions()),
}


def _permutation_error(network: Transformer, seed: int) -> float:
    """Return the largest difference between f(P x) and P f(x) for a random order P of the tokens."""
    generator = random_generator(seed)
    tokens = torch.randint(0, 16, (4, LENGTH), generator=generator)
    order = torch.randperm(LENGTH, generator=generator)
    return float((network(tokens[:, order]) - network(tokens)[:, order]).abs().max())


def _sentence_difference(network: Transformer) -> float:
    """Return how far apart the mean vectors of the two sentences are, relative to their length."""
    words = {word: number for number, word in enumerate(dict.fromkeys(" ".join(SENTENCES).split()))}
    tokens = torch.tensor([[words[word] for word in sentence.split()] for sentence in SENTENCES])
    first, second = network.hidden_states(tokens).mean(dim=1)
    return float((first - second).norm() / first.norm())


def _rope_scores(q: Tensor, k: Tensor, shift: int) -> Tensor:
    """Return the scores of a query at position 128 + shift and keys at all distances before it."""
    query_position = torch.tensor([[max(DISTANCES) + shift]])
    key_positions = query_position - torch.tensor([list(DISTANCES)])
    rotated = make_rotation(Rope(), query_position, WIDTH, torch.float64).rotate(q)  # (1, 1, 1, H)
    keys = k.expand(1, 1, len(DISTANCES), WIDTH)
    return (rotated * make_rotation(Rope(), key_positions, WIDTH, torch.float64).rotate(keys)).sum(dim=-1)[0, 0]


@torch.no_grad()
def _measure(run: Run) -> Measurements:
    found: Measurements = {"permutation": {}, "sentences": {}}
    for name, config in run.each(NETWORKS.items(), lambda item: item[0]):
        network = build(config, run.seed).double().eval()
        found["permutation"][name] = _permutation_error(network, run.seed)
        found["sentences"][name] = _sentence_difference(network)
    vector = torch.randn(1, 1, 1, WIDTH, generator=random_generator(run.seed), dtype=torch.float64)
    scores = torch.stack([_rope_scores(vector, vector, shift) for shift in SHIFTS]) / vector.square().sum()
    found["rope_scores"] = scores[0].tolist()
    found["shift_error"] = float((scores - scores[0]).abs().max())
    table = sinusoids(torch.arange(NUM_POSITIONS), TABLE_WIDTH, SinusoidalPositions(), torch.float64)
    found["sinusoid_similarity"] = cosine_similarity(table, table[:1]).tolist()
    others = torch.cdist(table, table) + torch.eye(NUM_POSITIONS) * 1e9
    found["smallest_distance"] = float(others.min())
    return found


def _holds(found: Measurements) -> bool:
    equivariant = found["permutation"]["without positions"] < 1e-10 and found["sentences"]["without positions"] < 1e-10
    ordered = all(found[kind][name] > 1e-2 for kind in ("permutation", "sentences") for name in list(NETWORKS)[1:])
    scores, similarity = found["rope_scores"], found["sinusoid_similarity"]
    alike = scores[1] > 0.9 > max(scores[8:]) and similarity[1] > 0.9 > max(similarity[8:])
    return equivariant and ordered and alike and found["shift_error"] < 1e-9 and found["smallest_distance"] > 0.1


def _conclude(results: Sequence[Measurements]) -> str:
    without, rope, _ = (mean([found["sentences"][name] for found in results]) for name in NETWORKS)
    return (
        f'without positions, "{SENTENCES[0]}" and "{SENTENCES[1]}" differ by {without:.0e}, with RoPE by {rope:.2f}; '
        f"a common shift of up to {max(SHIFTS)} changes RoPE's scores by at most "
        f"{max(found['shift_error'] for found in results):.0e}"
    )


def _tabulate(results: Sequence[Measurements]) -> Table:
    rows = {name: [(found["permutation"][name], found["sentences"][name]) for found in results] for name in NETWORKS}
    return spread_table("network", ["largest |f(Px) − P f(x)|", "difference of the two sentences"], rows)


def _draw(figure: Figure, results: Sequence[Measurements]) -> None:
    picture, distances, words = figure.subplots(1, 3, width_ratios=(1.3, 1, 0.8))
    table = sinusoids(torch.arange(NUM_POSITIONS), TABLE_WIDTH, SinusoidalPositions(), torch.float64)
    picture.imshow(table.numpy(), cmap="RdBu", aspect="auto", vmin=-1, vmax=1, interpolation="nearest")
    picture.set_title("Sinusoids from −1 (red) to 1 (blue)", fontsize=11, loc="left")
    picture.set(xlabel="entry", ylabel="position")
    scores = [found["rope_scores"] for found in results]
    plot_spread(distances, DISTANCES, scores, label="RoPE: score of equal vectors", color=COLORS[0], linewidth=1)
    similarity = [found["sinusoid_similarity"] for found in results]
    plot_spread(distances, range(NUM_POSITIONS), similarity, label="sinusoids: similarity", color=COLORS[1])
    finish_axes(distances, title="Near positions are alike", x="distance", y="relative to distance 0")
    values = [[found["sentences"][name] for found in results] for name in NETWORKS]
    bar_spread(words, [name.replace(" ", "\n") for name in NETWORKS], {"difference": values})
    finish_axes(words, title="Man chases dog, dog chases man", y="difference of the mean vectors", legend=False)


STUDY = Study(
    entry=ENTRIES["order"],
    claim="""Self-attention is permutation equivariant, Attn(PX) = P Attn(X) (A8), so without positions a sentence
        and its words in another order look the same (B5). RoPE's scores depend on the distance only and do not
        change under a common shift (B2). Sinusoids are unique, and near positions are alike (B1).""",
    setup=f"""Random bidirectional networks in double precision read tokens in two orders, and two sentences with the
        same words. RoPE's score is computed for a query and an equal key at every distance up to {max(DISTANCES)},
        at positions shifted by {", ".join(map(str, SHIFTS))}. The sinusoids are those of {NUM_POSITIONS} positions.""",
    explanation="""A weighted sum over a set does not know the order of the set. RoPE turns the query at m and the
        key at n by angles m·ω and n·ω, and the product of two turned vectors depends on the difference of the angles
        only. For small distances all pairs of entries still point the same way; then the fast pairs drift apart and
        the score falls and oscillates. Sinusoids behave alike, since their products are cosines of the same angles.""",
    limits="""The networks are random: the study shows what they can and cannot tell apart, not what they learn. A
        causal mask also gives order to a network without positions; see the study "nope".""",
    measure=_measure,
    holds=_holds,
    conclude=_conclude,
    tabulate=_tabulate,
    draw=_draw,
    figure_size=(13.0, 4.0),
)

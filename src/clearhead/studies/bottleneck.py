"""Study: changing the case of sentences with recurrent networks and a Transformer (book A4, C3, C4, D4).

clearhead study bottleneck
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from clearhead.data import Batch
from clearhead.families import transformer_config
from clearhead.inspection import draw_matrix, trace_recurrent
from clearhead.model import RecurrentTranslator, Transformer
from clearhead.studies.catalog import ENTRIES
from clearhead.studies.numbers import mean, spread_table
from clearhead.studies.pictures import COLORS, Figure, finish_axes, plot_spread
from clearhead.studies.study import Measurements, Run, Study, Table
from clearhead.studies.toys import build, build_recurrent, cross_entropy, random_generator, toy_recurrent, train

LENGTHS = (4, 8, 16, 32)
NUM_STEPS, WIDTH, BATCH = 700, 48, 32
CELLS: dict[str, Literal["tanh", "gru", "lstm"]] = {"tanh RNN": "tanh", "GRU": "gru", "LSTM": "lstm"}
ATTENTION = " + attention"
NETWORKS = (*CELLS, *(cell + ATTENTION for cell in CELLS), "Transformer")
SENTENCE = "I am learning"
SYMBOLS = ["<start>", "<U>", "<L>", *sorted(set(SENTENCE.lower() + SENTENCE.upper()))]
IDS = {symbol: number for number, symbol in enumerate(SYMBOLS)}
UPPER, LOWER = (torch.tensor([IDS.get(change(each), 0) for each in SYMBOLS]) for change in (str.upper, str.lower))
Network = RecurrentTranslator | Transformer


def _make_batch(length: int, num_rows: int, *key: int) -> Batch:
    """Return random sentences of this length after <U> or <L>, and the same sentences in the requested case."""
    generator = random_generator(*key)
    sentence = torch.randint(3, len(SYMBOLS), (num_rows, length), generator=generator)
    mode = torch.randint(1, 3, (num_rows, 1), generator=generator)
    answer = torch.where(mode == IDS["<U>"], UPPER[sentence], LOWER[sentence])
    tokens = torch.cat((torch.zeros_like(mode), answer[:, :-1]), dim=1)  # 0 is <start>
    return Batch(tokens, answer, source=torch.cat((mode, sentence), dim=1))


def _build_network(name: str, seed: int) -> Network:
    if name == "Transformer":
        config = transformer_config(
            source_vocab_size=len(SYMBOLS),
            target_vocab_size=len(SYMBOLS),
            width=WIDTH,
            num_layers=1,
            num_heads=4,
            feed_forward=2 * WIDTH,
            placement="pre",
        )
        return build(config, seed)
    cell, attends = CELLS[name.removesuffix(ATTENTION)], name.endswith(ATTENTION)
    recurrent = toy_recurrent(
        vocab_size=len(SYMBOLS), width=WIDTH, embedding_width=WIDTH // 2, cell=cell, attends=attends, bidirectional=True
    )
    return build_recurrent(recurrent, seed)


def _measure(run: Run) -> Measurements:
    lengths = LENGTHS[:2] if run.smoke else LENGTHS
    tests = [_make_batch(length, run.size(256, 4), run.seed, -length) for length in lengths]
    found: Measurements = {"lengths": list(lengths), "accuracy": {}}
    for name in run.each(NETWORKS):
        network = _build_network(name, run.seed)

        def loss_of(step: int, network: Network = network) -> Tensor:
            batch = _make_batch(lengths[step % len(lengths)], BATCH, run.seed, step)
            return cross_entropy(network(batch.source, batch.tokens), batch.targets)

        rate = 5e-3 if name == "Transformer" else 1e-2
        train(network, loss_of, num_steps=run.size(NUM_STEPS, 3), learning_rate=rate)
        found["accuracy"][name] = [_accuracy(network, batch) for batch in tests]
        if name == "GRU" + ATTENTION:
            assert isinstance(network, RecurrentTranslator)
            source, target = ["<U>", *SENTENCE], ["<start>", *SENTENCE.upper()[:-1]]
            traced = trace_recurrent(network, [IDS[each] for each in source], [IDS[each] for each in target])
            found["alignment"] = traced.cross_attention().tolist()
    return found


@torch.no_grad()
def _accuracy(network: Network, batch: Batch) -> float:
    """Return the share of characters that are predicted correctly, given the correct characters before them."""
    return float((network(batch.source, batch.tokens).argmax(dim=-1) == batch.targets).float().mean())


def _holds(found: Measurements) -> bool:
    last = {name: accuracies[-1] for name, accuracies in found["accuracy"].items()}
    helps = all(last[f"{cell} + attention"] > last[cell] + 0.15 for cell in CELLS)
    return helps and last["Transformer"] > 0.95 and max(last[cell] for cell in CELLS) < 0.5


def _conclude(results: Sequence[Measurements]) -> str:
    def accuracy(name: str) -> str:
        return ", ".join(f"{mean([found['accuracy'][name][i] for found in results]):.2f}" for i in range(len(LENGTHS)))

    return (
        f"accuracy at lengths {', '.join(map(str, LENGTHS))}: GRU {accuracy('GRU')}; with attention "
        f"{accuracy('GRU + attention')}; Transformer {accuracy('Transformer')}: one state is a bottleneck, attention "
        "widens it, and the Transformer has none"
    )


def _tabulate(results: Sequence[Measurements]) -> Table:
    columns = [f"length {length}" for length in results[0]["lengths"]]
    return spread_table("network", columns, {name: [found["accuracy"][name] for found in results] for name in NETWORKS})


def _draw(figure: Figure, results: Sequence[Measurements]) -> None:
    curves, alignment = figure.subplots(1, 2, width_ratios=(1.2, 1))
    for index, name in enumerate(NETWORKS):
        rows = [found["accuracy"][name] for found in results]
        color = "black" if name == "Transformer" else COLORS[index % len(CELLS)]
        line, width = "--" if name in CELLS else "-", 2.5 if name == "Transformer" else 1.5
        lengths = results[0]["lengths"]
        plot_spread(curves, lengths, rows, label=name, color=color, linestyle=line, linewidth=width, marker="o")
    title, x, y = "Accuracy on unseen sentences", "characters of the sentence", "share of correct characters"
    finish_axes(curves, title=title, x=x, y=y, xscale="log", ylim=(0, 1.03), ticks=results[0]["lengths"])
    matrix = torch.tensor(results[0]["alignment"])
    title, columns = "Alignment of the GRU with attention", ["<U>", *SENTENCE]
    draw_matrix(alignment, title, matrix, list(SENTENCE.upper()), columns, labeled=True)
    alignment.set(xlabel="the sentence that the encoder read", ylabel="what the decoder writes")


STUDY = Study(
    entry=ENTRIES["bottleneck"],
    claim="""A recurrent encoder-decoder without attention passes the whole sentence through one state, so it fails
        as sentences grow. With attention the decoder looks at all states of the encoder (A4), and a Transformer has
        no such bottleneck (C4, D4).""",
    setup=f"""The task of the book: "<U> I am" becomes "I AM", "<L> I am" becomes "i am", character by character.
        Sentences are random letters and spaces of "{SENTENCE}". Seven networks of one layer and width {WIDTH} train
        for {NUM_STEPS} steps on sentences of {LENGTHS[0]} to {LENGTHS[-1]} characters. Accuracy is the share of
        correct characters in unseen sentences, given the correct ones before.""",
    explanation=f"""A state of {WIDTH} numbers has to hold every character and its order; more characters leave less
        room for each. Attention keeps all encoder states and selects the one that the current step needs: the heatmap
        is a diagonal, shifted by the symbol for the case. A recurrent network still has to count in its state where
        it is, which gets harder with the length; the Transformer is told the position of every character.""",
    limits="""The networks are small and train briefly; a longer training raises all curves. Wide enough states hold
        short sentences, so the bottleneck appears at a length that depends on the width.""",
    measure=_measure,
    holds=_holds,
    conclude=_conclude,
    tabulate=_tabulate,
    draw=_draw,
    figure_size=(11.0, 4.6),
)

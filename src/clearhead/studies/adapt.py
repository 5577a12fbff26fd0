"""Study: a pretrained model adapted by prompting, fine-tuning and LoRA, and one from scratch (book D3).

clearhead study adapt
"""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor

from clearhead.architecture import Rope
from clearhead.model import Transformer
from clearhead.studies.catalog import ENTRIES
from clearhead.studies.numbers import mean, spread_table
from clearhead.studies.pictures import COLORS, Figure, bar_spread, finish_axes, plot_spread
from clearhead.studies.study import Measurements, Run, Study, Table
from clearhead.studies.toys import build, cross_entropy, random_generator, toy_decoder, train
from clearhead.training import Lora, add_lora

NUM_WORDS, NUM_LANGUAGES, NUM_PAIRS, WIDTH = 24, 4, 12, 32  # words are 0 … 23, those of language k follow
NUM_TAUGHT = 12  # words that occur in the texts of the adaptation
PRETRAINING_STEPS, ADAPTATION_STEPS, RANK = 800, 16, 4
CHECKS = (0, 2, 4, 8, 16)  # steps of adaptation after which accuracy is measured
EXAMPLES = (0, 1, 2, 4, 8, 11)  # examples in the prompt
METHODS = ("fine-tuning", "LoRA", "from scratch")


def _texts(languages: Tensor, generator: torch.Generator, num_words: int = NUM_WORDS) -> Tensor:
    """Return texts (B, 2·NUM_PAIRS): random words, each followed by its translation into the language of the text."""
    words = torch.randint(0, num_words, (len(languages), NUM_PAIRS), generator=generator)
    translations = NUM_WORDS * (1 + languages[:, None]) + words
    return torch.stack((words, translations), dim=2).flatten(1)


def _loss(network: Transformer, texts: Tensor) -> Tensor:
    """Return the loss of the translations only, which stand at every second place."""
    return cross_entropy(network(texts[:, :-1])[:, ::2], texts[:, 1::2])


@torch.no_grad()
def _accuracy(network: Transformer, texts: Tensor) -> list[float]:
    """Return the share of correct translations after 0, 1, 2, … examples in the same text."""
    network.eval()
    is_right = network(texts[:, :-1])[:, ::2].argmax(dim=-1) == texts[:, 1::2]
    return is_right.float().mean(dim=0).tolist()


def _measure(run: Run) -> Measurements:
    steps = [run.size(PRETRAINING_STEPS, 2), run.size(ADAPTATION_STEPS, 2)]
    config = toy_decoder(vocab_size=NUM_WORDS * (1 + NUM_LANGUAGES), width=WIDTH, position=Rope())
    task = torch.tensor([run.seed % NUM_LANGUAGES])  # the one language to translate into
    test = _texts(task.expand(run.size(256, 4)), random_generator(run.seed, -2))
    pretrained = build(config, run.seed)

    def pretraining_loss(step: int) -> Tensor:
        generator = random_generator(run.seed, step)
        return _loss(pretrained, _texts(torch.randint(0, NUM_LANGUAGES, (32,), generator=generator), generator))

    found: Measurements = {"curves": {}, "trained": {}}
    for stage in run.each(("pretraining", *METHODS)):
        if stage == "pretraining":
            found["pretraining_loss"] = train(pretrained, pretraining_loss, num_steps=steps[0], learning_rate=4e-3)[-1]
            found["prompting"] = _accuracy(pretrained, test)
            continue
        network = build(config, run.seed + 1000) if stage == "from scratch" else deepcopy(pretrained)
        if stage == "LoRA":
            add_lora(network, Lora(rank=RANK))
        found["trained"][stage] = sum(each.numel() for each in network.parameters() if each.requires_grad)
        found["curves"][stage] = _adapt(network, task, test, run, steps[1], 2e-2 if stage == "LoRA" else 4e-3)
    return found


def _adapt(network: Transformer, task: Tensor, test: Tensor, run: Run, num_steps: int, rate: float) -> list[float]:
    """Train on texts in the one language; return the accuracy without examples after each number of CHECKS."""
    checks = [check for check in CHECKS if check <= num_steps]
    accuracies = []

    def loss_of(step: int) -> Tensor:
        if step in checks:
            accuracies.append(_accuracy(network, test)[0])
        return _loss(network.train(), _texts(task.expand(16), random_generator(run.seed, step, 7), NUM_TAUGHT))

    train(network, loss_of, num_steps=num_steps, learning_rate=rate)
    return [*accuracies, _accuracy(network, test)[0]]


def _holds(found: Measurements) -> bool:
    tuned, adapted, fresh = (found["curves"][method][-1] for method in METHODS)
    prompted = found["prompting"][0] < 0.5 and found["prompting"][-1] > 0.95
    return prompted and min(tuned, adapted) > fresh + 0.15


def _conclude(results: Sequence[Measurements]) -> str:
    def last(method: str) -> str:
        return f"{mean([found['curves'][method][-1] for found in results]):.0%}"

    share = results[0]["trained"]["LoRA"] / results[0]["trained"]["fine-tuning"]
    return (
        f"a prompt with {EXAMPLES[-1]} examples translates {mean([found['prompting'][-1] for found in results]):.0%} "
        f"of {NUM_WORDS} words correctly without training; without examples, {ADAPTATION_STEPS} steps on {NUM_TAUGHT} "
        f"of the words reach {last('fine-tuning')} by fine-tuning, {last('LoRA')} by LoRA with {share:.0%} of the "
        f"weights, and {last('from scratch')} from scratch"
    )


def _tabulate(results: Sequence[Measurements]) -> Table:
    rows = {name: [(found["curves"][name][-1], found["trained"][name], 0) for found in results] for name in METHODS}
    for number in EXAMPLES:
        rows[f"prompt with {number} examples"] = [(found["prompting"][number], 0, 2 * number) for found in results]
    return spread_table("method", ["accuracy", "weights trained", "tokens more in every prompt"], rows, digits=5)


def _draw(figure: Figure, results: Sequence[Measurements]) -> None:
    prompting, training, weights = figure.subplots(1, 3, width_ratios=(1, 1, 0.7))
    rows = [found["prompting"] for found in results]
    plot_spread(prompting, range(len(rows[0])), rows, label="pretrained model", color=COLORS[0])
    finish_axes(prompting, title="Prompting", x="examples in the prompt", y="accuracy", ylim=(0, 1.03))
    for color, method in zip(COLORS, METHODS, strict=False):
        rows = [found["curves"][method] for found in results]
        plot_spread(training, CHECKS[: len(rows[0])], rows, label=method, color=color, marker="o")
    finish_axes(training, title="Training, no examples in the prompt", x="steps", y="accuracy", ylim=(0, 1.03))
    counts = {"weights": [[found["trained"][method] / 1000 for found in results] for method in METHODS]}
    bar_spread(weights, [method.replace(" ", "\n") for method in METHODS], counts, digits=0)
    finish_axes(weights, title="Trained weights (thousands)", legend=False)


STUDY = Study(
    entry=ENTRIES["adapt"],
    claim="""A model is pretrained once and then adapted to a task, by fine-tuning its weights or by a prompt (D3).""",
    setup=f"""A text is a list of words, each followed by its translation into the language of the text, one of
        {NUM_LANGUAGES}. A small network reads {PRETRAINING_STEPS} batches of such texts. The task is to translate
        {NUM_WORDS} words into one language. The same network gets it as examples in the prompt, by fine-tuning all
        weights for {ADAPTATION_STEPS} steps, and by LoRA of rank {RANK} for as many; for comparison, a new network
        trains from scratch for as many. The texts of these steps have only {NUM_TAUGHT} of the words.""",
    explanation="""Without an example the network cannot know the language and guesses. One example in the prompt
        tells it, since pretraining taught it to look: prompting costs no training, but tokens in every prompt.
        Fine-tuning makes the language part of the weights, in a few steps because the words are known already, and
        mostly also for the words that these steps did not show. LoRA does so with a small part of the weights, so
        that one model can keep many adapters. A new network learns the words that it is shown and no others.""",
    limits="""The task is one of those of the pretraining, so a prompt only has to select it. Tasks that a model has
        not seen need fine-tuning or a much larger model. How well fine-tuning carries over to other words differs
        between seeds.""",
    measure=_measure,
    holds=_holds,
    conclude=_conclude,
    tabulate=_tabulate,
    draw=_draw,
    figure_size=(13.0, 4.0),
)

"""Worked examples of part D of the book: targets, leaks, teacher forcing and the capitalization task (D1 to D4).

for example in training_examples(): print(example.title)
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from clearhead.course.parts import Example, Panel, Part, TextTable, inputs, numbered, tensor
from clearhead.data import causal, make_example, translation
from clearhead.model import Mask, Scoring, attention_steps, masked_softmax

MASKINGS = ("mask before the softmax", "mask after the softmax", "after, then renormalized", "no mask")


def training_examples() -> list[Example]:
    """Compute the examples of D1 to D4."""
    return [_shift(), _loss(), _leak(), _teacher_forcing(), _capitals()]


def _shift() -> Example:
    text = inputs("shift")["text"]
    words = list(text)
    x, y = causal(np.arange(len(words)))
    rows = [
        ("X", *(words[number] for number in x)),
        ("Y", *(words[number] for number in y)),
    ]
    columns = ("", *(str(number) for number in range(1, len(words))))
    explanation = f"The text “{text}” by characters. At every position the target is the character that follows."
    return Example("D1", "Shift by one", explanation, [TextTable("inputs and targets", columns, rows)])


def _loss() -> Example:
    given = inputs("loss")
    logits, targets = tensor(given["logits"]), torch.tensor(given["targets"])
    losses = functional.cross_entropy(logits, targets, reduction="none")
    words, steps = given["words"], numbered("position", len(logits))
    panels: list[Part] = [
        Panel("logits", logits, steps, words),
        Panel("softmax", logits.softmax(dim=-1), steps, words, kind="weights"),
        TextTable("targets", ("position", "target"), [(s, words[t]) for s, t in zip(steps, targets, strict=True)]),
        Panel("−log probability of the target", losses[None], columns=steps),
        Panel("loss: their sum, their mean", tensor([[float(losses.sum()), float(losses.mean())]])),
    ]
    explanation = "A distribution at each position, and one loss: gradients of all positions are computed together."
    return Example("D1", "One loss from all positions", explanation, panels)


def masked_weights(scores: Tensor, masking: str) -> Tensor:
    """Return the attention weights (T, T) of one of MASKINGS."""
    allowed = torch.ones_like(scores, dtype=torch.bool).tril()
    if masking == MASKINGS[0]:
        unit = torch.eye(len(scores), dtype=scores.dtype)[None, None]
        return attention_steps(scores[None, None], unit, unit, Scoring(Mask(causal=True), scale=1.0)).weights[0, 0]
    weights = masked_softmax(scores, None)
    if masking == MASKINGS[3]:
        return weights
    weights = weights * allowed
    return weights if masking == MASKINGS[1] else weights / weights.sum(dim=-1, keepdim=True)


def _influence(masking: str) -> Tensor:
    """Return how much each output changes with each token (T, T): the norm of the derivative."""
    x = tensor(inputs("leak")["x"])

    def outputs(tokens: Tensor) -> Tensor:
        return masked_weights(tokens @ tokens.T, masking) @ tokens

    with torch.enable_grad():
        derivative = torch.autograd.functional.jacobian(outputs, x)  # (T, D, T, D)
    assert isinstance(derivative, Tensor)
    return derivative.square().sum(dim=(1, 3)).sqrt().round(decimals=12)  # what renormalizing cancels is 1e-17


def _leak() -> Example:
    count = len(inputs("leak")["x"])
    tokens = numbered("token", count)
    outputs = numbered("output", count)
    panels: list[Panel] = [Panel("x", tensor(inputs("leak")["x"]), rows=tokens)]
    panels += [Panel(masking, _influence(masking), outputs, tokens, kind="scores") for masking in MASKINGS]
    explanation = (
        "How strongly each output depends on each token: the root of the sum of the squares of all derivatives of the "
        "output by the token. Here q = k = v = x, and the scores x·xᵀ are not scaled. Only the mask before the "
        "softmax, or renormalizing, leaves zeros above the diagonal. Masking after the softmax hides later values, but "
        "the denominators still depend on later tokens: that is a leak, and training finds it."
    )
    return Example("A5, D2", "Who depends on whom", explanation, panels)


def _teacher_forcing() -> Example:
    words = inputs("teacher")["target"]
    ids, targets = translation(range(1, len(words) + 1), start=0, end=len(words) + 1)
    names = ["<start>", *words, "<end>"]
    rows = [
        ("decoder reads", *(names[number] for number in ids)),
        ("decoder must say", *(names[number] for number in targets)),
    ]
    columns = ("", *(str(number) for number in range(1, len(ids) + 1)))
    explanation = (
        f"Encoder input: “{inputs('teacher')['source']}”. The decoder reads the correct words, whatever it would have "
        "said itself, so all positions are trained in one pass."
    )
    return Example("D3", "Teacher forcing", explanation, [TextTable("decoder", columns, rows)])


def _capitals() -> Example:
    pairs = [make_example("capitals", np.array(key, dtype=np.uint64), 8, 16) for key in range(20, 25)]
    pairs.insert(0, ("<U> I am a student", "I AM A STUDENT"))
    explanation = "The first pair is the book's; the task makes others from random numbers, as many as training needs."
    return Example("D4", "The capitalization task", explanation, [TextTable("pairs", ("source", "target"), pairs)])

"""Make the bundled examples of the page's guided tour with SmolLM2: the answers to the questions that the tour asks.

    python -m tests.page.make_examples        # writes src/clearhead/page/assets/example*.json

The heads that the tour shows are found by their scores, and the numbers in its texts are computed, so that the tour
stays true if the model is converted again.
"""

import json
from pathlib import Path
from typing import Any

import clearhead
from clearhead.inspection import attribute_logit, induction_scores, previous_token_scores
from clearhead.server.inspection_data import Inspector

FOLDER = Path(__file__).parents[2] / "src" / "clearhead" / "page" / "assets"
EVERY = 3  # the lens of an example shows every third layer
COLUMNS = 12  # positions of the lens, as in lens.js


class Example:
    """Answers to questions about one text, stored under the names that the page looks them up by."""

    def __init__(self, inspector: Inspector, name: str, title: str, teaser: str, text: str):
        self.inspector, self.name, self.title, self.teaser = inspector, name, title, teaser
        self.tokens = inspector.model.encode(text)
        self.trace = inspector.model.trace(self.tokens)
        self.answers: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []
        self.extra: dict[str, Any] = {}
        self.ask("trace")
        self.ask("probabilities")
        for layer in range(self.trace.num_layers):
            self.ask("thumbnails", view=0, layer=layer)
        self.last = len(self.tokens) - 1

    def ask(self, question: str, **fields: Any) -> Any:
        """Store the answer to a question and return it."""
        answer = self.inspector.answer(question, {"tokens": self.tokens, **fields})
        name = f"{question} {json.dumps(fields, separators=(',', ':'))}"
        self.answers[name] = _rounded(answer)
        return answer

    def show_lens(self, position: int) -> dict[str, Any]:
        """Store the lens and the tracks at a position."""
        last = min(max(position, COLUMNS - 1), self.last)
        self.ask("lens", every=EVERY, top=5, positions=list(range(max(last - COLUMNS + 1, 0), last + 1)))
        return self.ask("lens-tracks", position=position, count=8)

    def step(self, view: str, text: str, **params: Any) -> None:
        """Add a step of the tour."""
        self.steps.append({"view": view, "params": {"at": self.last} | params, "text": text})

    def word(self, token: int) -> str:
        """Return the text of a token in quotation marks."""
        return f"“{self.inspector.texts.text(token).strip()}”"

    def write(self, layer: int, head: int, query: int) -> dict[str, Any]:
        """Write the file of this example and return its entry for the list; its card shows one row of a head."""
        model = self.inspector.answer("model", {})
        data = {
            "name": self.name,
            "title": self.title,
            "model": {key: model[key] for key in ("name", "num_layers", "vocab_size", "width")},
            "tokens": self.tokens,
            "start": {"layer": layer, "head": head},
            "lens": {"every": EVERY},
            **self.extra,
            "answers": self.answers,
        }
        _write(f"example-{self.name}.json", data)
        preview = {
            "texts": self.trace.token_texts[: query + 1],
            "weights": [
                round(value, 3) for value in self.trace.attention(layer, head, rows=[query])[0][: query + 1].tolist()
            ],
            "query": query,
        }
        entry = {"name": self.name, "title": self.title, "teaser": self.teaser}
        return entry | {"preview": preview, "steps": self.steps}


def _rounded(value: Any) -> Any:
    """Round numbers to five digits; more would make the bundle larger and are not displayed."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, (list, tuple)) else value


def _write(name: str, data: Any) -> None:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    (FOLDER / name).write_text(text + "\n", encoding="utf-8")
    print(f"{name}: {len(text.encode()):,} bytes")


def _best(scores: Any) -> tuple[int, int]:
    """Return layer and head of the largest score of a list with one tensor (N,) per layer."""
    ranked = [(float(value), layer, head) for layer, row in enumerate(scores) for head, value in enumerate(row)]
    _, layer, head = max(ranked)
    return layer, head


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _first_lead(tracks: dict[str, Any]) -> int:
    """Return the first layer after which the final prediction is the most likely token."""
    place = tracks["tracks"][0]["ranks"].index(0)
    return int(tracks["stages"][place]["layer"])


def _copying_head(example: Example, token: int, column: int, against: int | None = None) -> tuple[int, int, float]:
    """Return the head that adds most to a logit among those that attend mostly to one token, and what it adds."""
    parts = attribute_logit(example.trace, token, against=against, by_head=True).contributions
    by_logit = sorted((part for part in parts if part.head is not None), key=lambda part: -part.logit)
    for part in by_logit:
        assert part.layer is not None
        assert part.head is not None
        if int(example.trace.attention(part.layer, part.head, rows=[example.last])[0].argmax()) == column:
            return part.layer, part.head, part.logit
    raise SystemExit(f"no head attends to token {column}; change the text of the example {example.name}")


def _explain_logit(example: Example, token: int, layer: int, head: int) -> float:
    """Store the attribution, and the effect of switching a head off; return the gain of the token without it."""
    example.ask("attribution", token=token, position=example.last)
    example.ask(
        "ablation", token=token, position=example.last, parts=[{"layer": layer, "part": "attention", "head": head}]
    )
    name = f'{{"layer":{layer},"part":"attention","head":{head}}}'
    key = f'ablation {{"token":{token},"position":{example.last},"parts":[{name}]}}'
    return float(example.answers[key]["gain"])


def make_induction(inspector: Inspector) -> dict[str, Any]:
    """A sentence repeats: an induction head finds what followed last time."""
    teaser = "A sentence begins again, and a head in the middle of the network knows how it goes on."
    text = "A kind fox met an old owl. A kind fox met an old"
    example = Example(inspector, "induction", "It copies a pattern", teaser, text)
    layer, head = _best(induction_scores(example.trace))
    early_layer, early_head = _best(previous_token_scores(example.trace)[:layer])
    weights = example.trace.attention(layer, head)[example.last]
    column = int(weights.argmax())
    example.ask("head", view=0, layer=layer, head=head)
    example.ask("head", view=0, layer=early_layer, head=early_head)
    token = example.answers["trace {}"]["next"][0]["id"]
    lead = _first_lead(example.show_lens(example.last))
    copy_layer, copy_head, logit = _copying_head(example, token, column)
    gain = _explain_logit(example, token, copy_layer, copy_head)
    query, seen = example.word(example.tokens[-1]), example.word(example.tokens[column])
    share, probability = float(weights[column]), example.answers["trace {}"]["next"][0]["probability"]
    example.step(
        "tokens",
        "This text begins to repeat itself. Towards its end the tokens turn pale: the model is no longer surprised. "
        "What does it do there?",
    )
    example.step(
        "attention",
        f"Layer {layer}, head {head} is an induction head. At the last {query} it puts {_percent(share)} of its "
        f"attention on {seen}: the token that followed {query} the first time.",
        layer=layer,
        head=head,
        col=column,
    )
    example.step(
        "attention",
        f"To find {seen}, the head must know which token came before it. Earlier heads bring that along, such as layer "
        f"{early_layer}, head {early_head}: its matrix is a line beside the diagonal: every token looks one back.",
        layer=early_layer,
        head=early_head,
        col=example.last - 1,
    )
    example.step(
        "attention",
        "Go through the steps of a head: scores compare queries with keys, the mask hides the future, softmax makes "
        "weights of what is left. Press the three buttons above the matrix.",
        layer=layer,
        head=head,
        col=column,
        step="scores",
    )
    example.step(
        "lens",
        f"The lens decodes the residual stream after every layer. After layer {lead}, {example.word(token)} leads for "
        f"the first time; at the end it has {_percent(probability)}.",
    )
    example.step(
        "circuit",
        f"Every part of the network adds to the logit of {example.word(token)}. Layer {copy_layer}, head {copy_head} "
        f"attends to {seen} and adds {logit:.1f}. Without it, the log-probability changes by only {gain:+.2f}: other "
        "heads do the same. Switch more of them off, if a model is running.",
        off=f"{copy_layer}h{copy_head}",
        token=token,
    )
    return example.write(layer, head, example.last)


def make_names(inspector: Inspector) -> dict[str, Any]:
    """Indirect object identification: who gets the drink?"""
    teaser = "Two people, one gives something to the other. Which heads work out who gets it?"
    text = "When Mary and John went to the store, John gave a drink to"
    example = Example(inspector, "names", "It keeps names apart", teaser, text)
    token, other = (inspector.model.encode(name)[-1] for name in (" Mary", " John"))
    column = example.tokens.index(token)
    layer, head, logit = _copying_head(example, token, column, against=other)
    share = float(example.trace.attention(layer, head)[example.last, column])
    example.ask("head", view=0, layer=layer, head=head)
    lead = _first_lead(example.show_lens(example.last))
    gain = _explain_logit(example, token, layer, head)
    first = example.answers["trace {}"]["next"][0]
    assert first["id"] == token
    example.step(
        "tokens",
        f"Mary and John were in the store, and John gave a drink to … The model says “Mary” with "
        f"{_percent(first['probability'])}. To know that, it must notice that John is the one who gives.",
    )
    example.step(
        "attention",
        f"Layer {layer}, head {head} moves the name: at the end of the text it puts {_percent(share)} of its attention "
        f"on “Mary”, and adds {logit:.1f} to the difference between “Mary” and “John”.",
        layer=layer,
        head=head,
        col=column,
    )
    example.step(
        "lens",
        f"Early layers have no idea. After layer {lead}, “Mary” leads for the first time. The lines below show the "
        "tokens that ranked high on the way.",
    )
    example.step(
        "circuit",
        f"Blue cells push “Mary” up, orange ones push it down. Layer {layer}, head {head} is switched off here: the "
        f"log-probability of “Mary” changes by {gain:+.2f}.",
        off=f"{layer}h{head}",
        token=token,
    )
    return example.write(layer, head, example.last)


def make_capitals(inspector: Inspector) -> dict[str, Any]:
    """A fact: the capital of France, and where it is while the model reads."""
    teaser = "Where is Paris while the model reads “France”? Move a thought from one text into another."
    text, other = "The capital of France is", "The capital of Italy is"
    example = Example(inspector, "capitals", "It recalls a fact", teaser, text)
    token = inspector.model.encode(" Paris")[-1]
    column = example.tokens.index(inspector.model.encode(" France")[-1])
    layer, head, logit = _copying_head(example, token, column)
    share = float(example.trace.attention(layer, head)[example.last, column])
    example.ask("head", view=0, layer=layer, head=head)
    lead = _first_lead(example.show_lens(example.last))
    gain = _explain_logit(example, token, layer, head)
    corrupted = inspector.model.encode(other)
    rows = [
        example.ask("patch-row", corrupted=corrupted, token=token, layer=number, position=example.last)["gains"]
        for number in range(example.trace.num_layers)
    ]
    moved = max(number for number, row in enumerate(rows) if row[column] > row[-1])
    example.extra = {"other": other, "otherTokens": inspector.texts.describe(corrupted)}
    first = example.answers["trace {}"]["next"][0]
    assert first["id"] == token
    example.step(
        "lens",
        f"Each column is a token of the text, each row a layer. At the end, the model says “Paris” with "
        f"{_percent(first['probability'])}; it leads for the first time after layer {lead}.",
    )
    example.step(
        "attention",
        f"Layer {layer}, head {head} fetches it: at “is” it puts {_percent(share)} of its attention on “France”, where "
        "earlier layers have prepared what they know.",
        layer=layer,
        head=head,
        col=column,
    )
    example.step(
        "circuit",
        f"This head alone adds {logit:.1f} to the logit of “Paris”; without it the log-probability changes by "
        f"{gain:+.2f}. Below, the model reads the text about Italy with pieces of this one. Up to layer {moved} it "
        "is “France” that brings Paris back, after that the last token.",
        off=f"{layer}h{head}",
        token=token,
    )
    return example.write(layer, head, example.last)


def main() -> None:
    """Write all examples."""
    inspector = Inspector(clearhead.load("smollm2"), "smollm2")
    _write("examples.json", [make(inspector) for make in (make_induction, make_names, make_capitals)])


if __name__ == "__main__":
    main()

"""TextReader: what a model does with texts in one forward pass, without generating: embed, classify, rerank.

clearhead.load("minilm").embed(["A cat sat."]); clearhead.load("my-classifier").classify("I liked it.")
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from clearhead.api.classification import (
    Classification,
    Pair,
    Ranked,
    TokenLabel,
    classify_texts,
    rerank_texts,
)
from clearhead.api.embedding import embed_texts
from clearhead.architecture import ModelConfig
from clearhead.checkpoint import ModelParts
from clearhead.generation import Prompt


@dataclass(frozen=True, eq=False, repr=False)
class TextReader(ModelParts):
    """The methods of Model that turn texts into vectors and labels."""

    @property
    def config(self) -> ModelConfig:
        """The architecture of the network."""
        return self.network.config

    def embed(
        self, texts: str | Sequence[Prompt], *, prompt_name: str | None = None, prompt: str | None = None
    ) -> torch.Tensor:
        """Return one embedding per text, a tensor (texts, width).

        A sentence-transformers model applies its own pooling and normalization. Any other model gives the mean of the
        last hidden states, scaled to length 1.

        prompt_name: name of a prompt of the model, such as "query", to put before each text. None: its default, if any.
        prompt: a prompt of your own, instead.
        """
        return embed_texts(self, self.config, texts, prompt_name, prompt)

    def classify(
        self, texts: str | Pair | Sequence[Prompt | Pair], *, truncate: bool = False
    ) -> list[Classification] | list[list[TokenLabel]]:
        """Return the labels of each text or pair of texts; a model that labels tokens returns a list for each text.

        A pair is a tuple of two texts, for models that compare them.

        truncate: cut off what is longer than the model can read, instead of raising ClearheadError.
        """
        return classify_texts(self, self.config, texts, truncate=truncate)

    def rerank(self, query: str, documents: Sequence[str]) -> list[Ranked]:
        """Return the documents with the scores of a cross-encoder for this query, the best first.

        Documents that are longer than the model can read are cut off.
        """
        return rerank_texts(self, self.config, query, documents)

"""The labels of a classification head: their names, and how its scores become probabilities.

labels = read_labels(config.classifier, Settings(json_data, "config.json")); labels.names
"""

from dataclasses import dataclass
from typing import Any, Literal

from clearhead.architecture import Classifier
from clearhead.errors import ClearheadError, quote
from clearhead.families import Settings

# Settings of the sentence-transformers library for the function after the scores of a cross-encoder.
_ACTIVATION, _OLD_ACTIVATION = "activation_fn", "sbert_ce_default_activation_function"
_ACTIVATIONS: "dict[str, Literal['identity', 'sigmoid', 'softmax']]" = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
}
_PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labels of a classification head.

    softmax: exactly one label applies. sigmoid: each label applies or not. identity: the score is the result itself.
    """

    names: tuple[str, ...]
    activation: Literal["softmax", "sigmoid", "identity"]
    problem_type: str | None = None  # of transformers, kept from load to save

    def settings(self) -> dict[str, Any]:
        """Return the settings of config.json from which `read_labels` reads these labels."""
        data: dict[str, Any] = {"id2label": {str(number): name for number, name in enumerate(self.names)}}
        data["label2id"] = {name: number for number, name in enumerate(self.names)}
        if self.problem_type is not None:
            data["problem_type"] = self.problem_type
        if self.activation != _default_activation(self.problem_type, len(self.names)):
            path = next(path for path, name in _ACTIVATIONS.items() if name == self.activation)
            data["sentence_transformers"] = {_ACTIVATION: path}
        return data


def read_labels(classifier: Classifier | None, settings: Settings) -> Labels | None:
    """Return the labels of a model with this classifier; None if it has none."""
    if classifier is None:
        return None
    found = settings.object("id2label")
    numbers = [str(number) for number in range(classifier.num_labels)]
    names = tuple(found.string(number, f"LABEL_{number}") for number in numbers)
    problem_type = settings.string("problem_type") if "problem_type" in settings else None
    if problem_type not in (None, *_PROBLEM_TYPES):
        raise ClearheadError(f"{settings.where}: 'problem_type' is {quote(problem_type)}, which is not supported")
    default = _default_activation(problem_type, classifier.num_labels)
    path = settings.object("sentence_transformers").data.get(_ACTIVATION, settings.data.get(_OLD_ACTIVATION))
    if path is not None and path not in _ACTIVATIONS:
        raise ClearheadError(f"{settings.where}: the activation {quote(path)} of the scores is not supported")
    return Labels(names=names, activation=default if path is None else _ACTIVATIONS[path], problem_type=problem_type)


def _default_activation(problem_type: str | None, num_labels: int) -> Literal["softmax", "sigmoid", "identity"]:
    """Return what transformers' pipelines apply to the scores."""
    if problem_type == "regression":
        return "identity"
    return "sigmoid" if problem_type == "multi_label_classification" or num_labels == 1 else "softmax"

"""Measure how good a model is, with the metrics that others report.

    result = evaluate_perplexity(clearhead.load("smollm2"), "Paris is the capital of France."); result["perplexity"]

perplexity        perplexity and bits per byte of a text
multiple_choice   tasks whose choices are compared by likelihood: HellaSwag, ARC, PIQA, WinoGrande, LAMBADA
answers           generated answers compared with references: translations, and pairs of any kind
likelihood        log-probabilities of continuations, in batches
engine_likelihood the same in the engine, with the bits that a server returns
harness           an adapter for lm-evaluation-harness; it is not imported here because it needs that package
result            metrics, their standard errors, and the settings they depend on
"""

from clearhead.evaluation.answers import evaluate_pairs, evaluate_translation
from clearhead.evaluation.multiple_choice import evaluate_multiple_choice
from clearhead.evaluation.perplexity import bits_per_byte, evaluate_perplexity
from clearhead.evaluation.result import EvaluationResult

__all__ = [
    "EvaluationResult",
    "bits_per_byte",
    "evaluate_multiple_choice",
    "evaluate_pairs",
    "evaluate_perplexity",
    "evaluate_translation",
]

"""Verify on the user's own model that every optimization computes what a plain forward pass does.

    for result in verify(clearhead.load("smollm2", dtype="float32")): print(result.check, result.verdict)

case                the model under test, the sequences it reads, and their reference logits
results             comparisons, tolerances and verdicts
forward_checks      checks of one forward pass: batches, padding, attention kernels, compilation, transformers
cache_checks        checks of key-value caches
generation_checks   checks of the decoding loops
engine_checks       checks of the engine
determinism_checks  the check that a text has the same bits alone and among others
backend_checks      checks of the C++ kernels and of packed weights
recurrent_checks    checks of the recurrent baseline
checks              the table of all checks, and verify
report              results as a table in the terminal
"""

from clearhead.verification.checks import verify
from clearhead.verification.report import print_results
from clearhead.verification.results import CheckResult

__all__ = ["CheckResult", "print_results", "verify"]

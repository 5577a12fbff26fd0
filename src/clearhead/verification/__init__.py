"""A proof, on the user's own model, that every fast way computes what the plain one does.

for finding in verify(clearhead.load("smollm2", dtype="float32")): print(finding.check, finding.verdict)

subject      the network, and a few texts for it to read
finding      difference, tolerance, verdict
reading      checks of one forward: batches, padding, kernels, compilation, transformers
caching      checks of what is kept between steps
generating   checks of the loops that make tokens
checks       the table of them all
report       the findings as a table
"""

from clearhead.verification.report import (
    print_findings,
)

__all__ = [
    "checks",
    "print_findings",
]

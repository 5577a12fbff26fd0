"""The table of checks, and the one way to run them.

findings = list(verify(model)); all(finding.verdict != "fail" for finding in findings)
"""

from collections.abc import Iterator, Mapping

from clearhead.api import Model
from clearhead.verification import caching, fast, generating, reading
from clearhead.verification.finding import Check, Finding, examine
from clearhead.verification.subject import Subject

CHECKS: Mapping[str, Check] = {
    "prefix == whole": reading.prefix_alone,
    "batched == single": reading.batched,
    "padded left == unpadded": reading.padded_left,
    "padded right == unpadded": reading.padded_right,
    "fused attention == reference": reading.fused_kernel,
    "absorbed latent == unfolded": reading.absorbed_latent,
    "remembered source == read again": reading.remembered_source,
    "cached == uncached": caching.token_by_token,
    "contiguous cache == uncached": caching.contiguous,
    "sliding cache == uncached": caching.sliding,
    "paged cache == uncached": caching.paged,
    "chunked prefill == whole": caching.chunked_prefill,
    "forked cache == fresh": caching.forked,
    "truncated cache == fresh": caching.truncated,
    "reloaded cache == fresh": caching.reloaded,
    "selected rows == fresh": caching.selected,
    "greedy, cached == uncached": generating.greedy_alone,
    "greedy, batched == single": generating.greedy_batched,
    "speculative == greedy": generating.speculative,
    "kernel step == network": fast.kernel_step,
    "compiled == eager": reading.compiled,
    "8-bit weights ~ full": fast.eight_bits,
    "4-bit weights ~ full": fast.four_bits,
    "ours == transformers": reading.in_transformers,
}


def verify(
    model: Model, *, length: int | None = None, num_new: int | None = None, compiles: bool = False
) -> Iterator[Finding]:
    """One finding after another, in the precision the model is in; float32 shows most.

    `length`: tokens of the longest text read. `num_new`: tokens made by each loop. `compiles`: also try torch.compile.
    """
    subject = Subject.of(model, length=length, num_new=num_new, compiles=compiles)
    return (examine(name, check, subject) for name, check in CHECKS.items())

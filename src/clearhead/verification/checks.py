"""The table of all checks, and the function that runs them.

all_agree = all(result.verdict != "fail" for result in verify(model))

Each name has the two things that are compared: `==` means equal within the precision, `~` within the bound of the
method. A "full forward" reads a whole text at once, alone and without a cache.
"""

from collections.abc import Callable, Iterator, Mapping

from clearhead.api import Model, RecurrentBaseline
from clearhead.verification import (
    backend_checks,
    cache_checks,
    determinism_checks,
    engine_checks,
    forward_checks,
    generation_checks,
)
from clearhead.verification.case import VerificationCase
from clearhead.verification.recurrent_checks import verify_recurrent
from clearhead.verification.results import Check, CheckResult, run_check

CHECKS: Mapping[str, Check] = {
    "prefix == full text": forward_checks.prefixes,
    "batch == single sequence": forward_checks.batch,
    "left padding == no padding": forward_checks.left_padding,
    "right padding == no padding": forward_checks.right_padding,
    "fused attention == reference attention": forward_checks.fused_attention_kernel,
    "absorbed latent attention == unfolded": forward_checks.absorbed_latent_attention,
    "precomputed cross-attention == computed": forward_checks.precomputed_cross_attention,
    "cached decoding == full forward": cache_checks.token_by_token,
    "contiguous cache == full forward": cache_checks.contiguous_cache,
    "sliding-window cache == full forward": cache_checks.sliding_window_cache,
    "paged cache == full forward": cache_checks.paged_cache,
    "chunked prefill == full forward": cache_checks.chunked_prefill,
    "forked cache == full forward": cache_checks.forked_cache,
    "truncated cache == full forward": cache_checks.truncated_cache,
    "saved and loaded cache == full forward": cache_checks.saved_cache,
    "reordered cache == full forward": cache_checks.reordered_cache,
    "greedy decoding == full forward": generation_checks.greedy,
    "batched greedy decoding == full forward": generation_checks.batched_greedy,
    "speculative decoding == greedy decoding": generation_checks.speculative,
    "engine == full forward": engine_checks.engine,
    "text among others == text alone": determinism_checks.determinism,
    "C++ kernels == PyTorch modules": backend_checks.cpu_kernels,
    "torch.compile == eager": forward_checks.compiled,
    "8-bit weights ~ full weights": backend_checks.int8_weights,
    "4-bit weights ~ full weights": backend_checks.int4_weights,
    "Clearhead == transformers": forward_checks.transformers,
}


def verify(
    model: Model,
    *,
    length: int | None = None,
    num_new_tokens: int | None = None,
    compiles: bool = False,
    progress: Callable[[str, int, int], object] = lambda check, done, total: None,
) -> Iterator[CheckResult]:
    """Run all checks in the dtype of the model and yield one result after another; 16-bit dtypes hide small errors.

    length: number of tokens of the longest text; None takes enough to exceed sliding windows. num_new_tokens: number
    of tokens that each decoding loop generates; None takes 256, or 32 for a large model. compiles: also check
    torch.compile, which takes a minute. progress: called before each check with its name, the number of finished checks
    and the number of all.
    """
    if isinstance(model, RecurrentBaseline):
        return verify_recurrent(model, length=length, num_new_tokens=num_new_tokens, progress=progress)
    case = VerificationCase.create(model, length=length, num_new_tokens=num_new_tokens, compiles=compiles)

    def run_checks() -> Iterator[CheckResult]:
        for done, (name, check) in enumerate(CHECKS.items()):
            progress(name, done, len(CHECKS))
            yield run_check(name, check, case)

    return run_checks()

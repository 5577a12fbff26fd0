"""One thing broken at a time: the check that watches it must fail by its numbers, and an unrelated one must not."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from clearhead.backends.cpu import plan
from clearhead.backends.packed import modules
from clearhead.cache.cache import KeyValueCache
from clearhead.cache.paged import PageStorage
from clearhead.cache.stores import ContiguousStore, SlidingStore
from clearhead.generation import decode, speculative
from clearhead.model import attend, context, masks, positions, transformer
from clearhead.model.latent_attention import LatentAttentionLayer
from clearhead.model.masks import Mask
from clearhead.model.transformer import Transformer
from clearhead.verification import reading
from clearhead.verification.checks import CHECKS
from clearhead.verification.finding import examine
from clearhead.verification.subject import Subject
from tests.verification.models import kernels_are_here, toy_model


@dataclass(frozen=True)
class Control:
    broken: Callable  # (monkeypatch) -> None
    unharmed: str  # a check that does not look there
    style: str = "llama"
    compiles: bool = False


def wrapped(owner, name, change):
    """A break that puts `change(original)` in place of owner.name."""
    return lambda patch: patch.setattr(owner, name, change(getattr(owner, name)))


# --- one forward


def all_seeing(original):
    return lambda pattern, grid: Mask()


def reads_its_neighbour(original):
    return lambda q, k, v, **options: original(q, k.roll(1, 0), v, **options)


def counts_padding(original):
    return lambda tokens, mask: torch.arange(tokens.shape[1])[None].expand_as(tokens)


def counts_padding_behind(original):
    def shifted(tokens, mask):
        if mask is None:
            return original(tokens, mask)
        behind = tokens.shape[1] - 1 - (mask.long() * torch.arange(tokens.shape[1])).amax(dim=1, keepdim=True)
        return original(tokens, mask) + behind

    return shifted


def scales_by_another_width(original):
    return lambda q, k, v, scale, **options: original(q, k, v, scale=1.01 * scale, **options)


def turns_faster(original):
    return lambda *given: 1.01 * original(*given)


def forgets_the_rotation(original):
    return lambda self, p, r, *rest: original(self, p, torch.zeros_like(r), *rest)


def swaps_layers(original):
    def remember(self, encoder_output):
        made = original(self, encoder_output)
        return transformer.replace(made, cross_keys_values=made.cross_keys_values[::-1])

    return remember


def rounds_off(original):
    return lambda network: lambda *inputs: network(*inputs).half().float()


# --- caches


def starts_at_zero(original):
    return lambda self, tokens, mask=None: original(self, tokens, mask) * 0 + torch.arange(tokens.shape[1])


def gives_stale_keys(original):
    def write(self, length, key, value):
        stale = None if self.key is None else self.key.clone()
        keys, values = original(self, length, key, value)
        return (keys if stale is None or stale.shape[2] < keys.shape[2] else stale[:, :, : keys.shape[2]]), values

    return write


def is_off_by_one(original):
    return lambda self, length: original(self, length + 1)


def has_a_slot_too_few(original):
    def init(self, window, slack=16):
        original(self, window, slack)
        self.size = window + slack - 1

    return init


def copies_nothing(original):
    return lambda self, source, destination: None


def masks_only_the_first_piece(original):
    return lambda network, tokens, mask, cache, encoder_output: original(
        network, tokens, mask if cache.length == 0 else None, cache, encoder_output
    )


def masks_nothing(original):
    return lambda network, tokens, mask, cache, encoder_output: original(network, tokens, None, cache, encoder_output)


def is_no_copy(original):
    return lambda self: self


def forgets_nothing(original):
    return lambda self, length: None


def swaps_keys_and_values(original):
    return lambda self, key, value, length: original(self, value, key, length)


def mixes_rows(original):
    return lambda self, rows: original(self, rows.flip(0))


# --- loops


def takes_the_second_best(original):
    def next_tokens(logits, rows, steps, counts=None):
        second = logits.topk(2).indices[:, 1]
        return torch.where(steps == 9, second, original(logits, rows, steps, counts))

    return next_tokens


def believes_every_guess(original):
    def verify(network, row, draft, logits):
        return [*draft.tokens, original(network, row, draft, logits)[-1]]

    return verify


# --- the fast ways


def turns_too_far(original):
    return lambda rope, positions, *rest: original(rope, 2 * positions, *rest)


def looks_past_its_window(original):
    return lambda pattern, grid: Mask(torch.ones_like(original(pattern, grid).allowed))


def masks_no_source(original):
    return lambda source_mask: Mask()


def mistakes_the_zero_point(original):
    def pack(weight, bits):
        made = original(weight, bits)
        return replace(made, quants=made.quants ^ (-128 if bits == "int8" else 0x88))

    return pack


PREFIX, CACHED, CONTIGUOUS = "prefix == whole", "cached == uncached", "contiguous cache == uncached"
SLIDING, LEFT, RIGHT = "sliding cache == uncached", "padded left == unpadded", "padded right == unpadded"
FORKED, TRUNCATED, GREEDY = "forked cache == fresh", "truncated cache == fresh", "greedy, cached == uncached"
BATCHED, KERNELS = "batched == single", "kernel step == network"

CONTROLS = [
    (PREFIX, Control(wrapped(context, "make_mask", all_seeing), BATCHED)),
    (BATCHED, Control(wrapped(attend, "scaled_dot_product_attention", reads_its_neighbour), PREFIX)),
    (LEFT, Control(wrapped(masks, "positions_from", counts_padding), RIGHT, "gpt2")),
    (RIGHT, Control(wrapped(masks, "positions_from", counts_padding_behind), LEFT, "gpt2")),
    (
        "fused attention == reference",
        Control(wrapped(attend, "scaled_dot_product_attention", scales_by_another_width), CACHED),
    ),
    (
        "absorbed latent == unfolded",
        Control(wrapped(LatentAttentionLayer, "absorbed", forgets_the_rotation), PREFIX, "deepseek"),
    ),
    ("remembered source == read again", Control(wrapped(Transformer, "precompute_cross_attention", swaps_layers), LEFT, "t5")),
    (CACHED, Control(wrapped(KeyValueCache, "begin", starts_at_zero), LEFT)),
    (
        CACHED,
        Control(wrapped(LatentAttentionLayer, "absorbed", forgets_the_rotation), LEFT, "deepseek"),
    ),
    (CONTIGUOUS, Control(wrapped(ContiguousStore, "write", gives_stale_keys), SLIDING, "mistral")),
    (SLIDING, Control(wrapped(SlidingStore, "ring", is_off_by_one), CONTIGUOUS, "mistral")),
    (SLIDING, Control(wrapped(SlidingStore, "__init__", has_a_slot_too_few), CONTIGUOUS, "llama4")),
    ("paged cache == uncached", Control(wrapped(PageStorage, "copy", copies_nothing), CONTIGUOUS)),
    ("chunked prefill == whole", Control(wrapped(decode, "run", masks_only_the_first_piece), FORKED)),
    (FORKED, Control(wrapped(KeyValueCache, "fork", is_no_copy), TRUNCATED, "gemma3")),
    (TRUNCATED, Control(wrapped(KeyValueCache, "truncate", forgets_nothing), FORKED, "gemma3")),
    ("reloaded cache == fresh", Control(wrapped(ContiguousStore, "restore", swaps_keys_and_values), FORKED)),
    ("reloaded cache == fresh", Control(wrapped(SlidingStore, "restore", swaps_keys_and_values), FORKED, "mistral")),
    ("selected rows == fresh", Control(wrapped(ContiguousStore, "select", mixes_rows), FORKED)),
    (GREEDY, Control(wrapped(decode, "next_tokens", takes_the_second_best), CACHED)),
    ("greedy, batched == single", Control(wrapped(KeyValueCache, "select", mixes_rows), GREEDY)),
    ("greedy, batched == single", Control(wrapped(decode, "run", masks_nothing), GREEDY, "bloom")),
    ("speculative == greedy", Control(wrapped(speculative, "verify", believes_every_guess), GREEDY)),
    (KERNELS, Control(wrapped(plan, "rotation_for", turns_too_far), CACHED)),
    (KERNELS, Control(wrapped(plan, "make_mask", looks_past_its_window), SLIDING, "mistral")),
    (KERNELS, Control(wrapped(plan, "cross_attention_mask", masks_no_source), CACHED, "bart")),
    ("8-bit weights ~ full", Control(wrapped(modules, "pack", mistakes_the_zero_point), CACHED)),
    ("4-bit weights ~ full", Control(wrapped(modules, "pack", mistakes_the_zero_point), CACHED)),
    ("compiled == eager", Control(wrapped(reading.torch, "compile", rounds_off), PREFIX, compiles=True)),
    ("ours == transformers", Control(wrapped(positions, "rope_frequencies", turns_faster), CACHED)),
]


@pytest.mark.parametrize(("check", "control"), CONTROLS, ids=[name for name, _ in CONTROLS])
def test_what_is_broken_is_seen_and_nothing_else(check, control, monkeypatch):
    if check == KERNELS and not kernels_are_here():
        pytest.skip("no compiler for the kernels")
    control.broken(monkeypatch)
    subject = Subject.of(toy_model(control.style), num_new=24, compiles=control.compiles)
    failed = examine(check, CHECKS[check], subject)
    assert failed.verdict == "fail"
    assert failed.difference > (3 if " == " in check else 2) * failed.tolerance
    assert examine(control.unharmed, CHECKS[control.unharmed], subject).verdict == "pass"


def test_every_check_has_its_control():
    assert {name for name, _ in CONTROLS} == set(CHECKS)

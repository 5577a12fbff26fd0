"""Break one thing at a time: the check for it must fail by its numbers, and an unrelated check must pass."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from clearhead.backends import lowering, sensitivity
from clearhead.backends.cpu import attention_inputs
from clearhead.cache.key_value_cache import KeyValueCache
from clearhead.cache.packed_cache import PackedLayout
from clearhead.cache.page_storage import PageStorage
from clearhead.cache.stores import ContiguousStore, SlidingStore
from clearhead.engine.runner import Runner
from clearhead.generation import decoding, speculative
from clearhead.model import attend, context, masks, positions, transformer
from clearhead.model.latent_attention import LatentAttentionLayer
from clearhead.model.masks import Mask
from clearhead.model.transformer import Transformer
from clearhead.verification import forward_checks
from clearhead.verification.case import VerificationCase
from clearhead.verification.checks import CHECKS
from clearhead.verification.results import run_check
from tests.verification.models import kernels_available, toy_model


@dataclass(frozen=True)
class Control:
    """A defect, and a check that it does not affect."""

    break_it: Callable  # (monkeypatch) -> None
    unaffected: str
    style: str = "llama"
    compiles: bool = False


def replaced(owner, name, change):
    """Return a function that replaces owner.name by change(original)."""
    return lambda patch: patch.setattr(owner, name, change(getattr(owner, name)))


# --- one forward pass


def attends_everywhere(original):
    return lambda pattern, indices: Mask()


def reads_keys_of_another_sequence(original):
    return lambda q, k, v, **options: original(q, k.roll(1, 0), v, **options)


def counts_left_padding(original):
    return lambda tokens, mask: torch.arange(tokens.shape[1])[None].expand_as(tokens)


def counts_right_padding(original):
    def shifted(tokens, mask):
        if mask is None:
            return original(tokens, mask)
        num_padding = tokens.shape[1] - 1 - (mask.long() * torch.arange(tokens.shape[1])).amax(dim=1, keepdim=True)
        return original(tokens, mask) + num_padding

    return shifted


def scales_scores_differently(original):
    return lambda q, k, v, scale, **options: original(q, k, v, scale=1.01 * scale, **options)


def rotates_faster(original):
    return lambda *arguments: 1.01 * original(*arguments)


def forgets_the_rotation(original):
    return lambda self, p, r, *rest: original(self, p, torch.zeros_like(r), *rest)


def swaps_layers(original):
    def precompute(self, encoder_output):
        output = original(self, encoder_output)
        return transformer.replace(output, cross_keys_values=output.cross_keys_values[::-1])

    return precompute


def rounds_to_half_precision(original):
    return lambda network: lambda *inputs: network(*inputs).half().float()


# --- caches


def restarts_positions(original):
    return lambda self, tokens, mask=None: original(self, tokens, mask) * 0 + torch.arange(tokens.shape[1])


def returns_stale_keys(original):
    def write(self, length, key, value):
        stale = None if self.key is None else self.key.clone()
        keys, values = original(self, length, key, value)
        return (keys if stale is None or stale.shape[2] < keys.shape[2] else stale[:, :, : keys.shape[2]]), values

    return write


def shifts_the_ring_by_one(original):
    return lambda self, length: original(self, length + 1)


def has_one_slot_too_few(original):
    def init(self, window, slack=16):
        original(self, window, slack)
        self.size = window + slack - 1

    return init


def copies_nothing(original):
    return lambda self, source, destination: None


def mixes_sequences(original):
    return property(lambda self: torch.zeros_like(self.positions))


def writes_one_slot_off(original):
    return lambda self, layer, slots, key, value: original(self, layer, slots.roll(1), key, value)


def masks_only_the_first_chunk(original):
    return lambda network, tokens, cache, mask=None, encoder_output=None: original(
        network, tokens, cache, mask if cache.length == 0 else None, encoder_output
    )


def masks_nothing(original):
    return lambda network, tokens, cache, mask=None, encoder_output=None: original(
        network, tokens, cache, None, encoder_output
    )


def returns_the_original(original):
    return lambda self: self


def does_not_truncate(original):
    return lambda self, length: None


def swaps_keys_and_values(original):
    return lambda self, key, value, length: original(self, value, key, length)


def reverses_the_order(original):
    return lambda self, rows: original(self, rows.flip(0))


# --- loops


def takes_the_second_best(original):
    def next_tokens(logits, rows, steps, counts=None):
        second = logits.topk(2).indices[:, 1]
        return torch.where(steps == 9, second, original(logits, rows, steps, counts))

    return next_tokens


def accepts_every_draft(original):
    def verify(network, row, draft, logits):
        return [*draft.tokens, original(network, row, draft, logits)[-1]]

    return verify


# --- backends


def rotates_too_far(original):
    return lambda rope, positions, *rest: original(rope, 2 * positions, *rest)


def ignores_the_window(original):
    return lambda pattern, indices: Mask(torch.ones_like(original(pattern, indices).allowed))


def ignores_the_source_mask(original):
    return lambda source_mask: Mask()


def uses_another_zero_point(original):
    def pack(weight, bits, dtype=None):
        packed = original(weight, bits, dtype)
        return replace(packed, quants=packed.quants ^ (-128 if bits == "int8" else 0x88))

    return pack


def depends_on_the_number_of_rows(original):
    def logits(self, hidden):
        return original(self, hidden) * (1 + (len(hidden) > 1) * torch.finfo(hidden.dtype).eps)

    return logits


PREFIX, CACHED, CONTIGUOUS = (
    "prefix == full text",
    "cached decoding == full forward",
    "contiguous cache == full forward",
)
SLIDING, LEFT, RIGHT = (
    "sliding-window cache == full forward",
    "left padding == no padding",
    "right padding == no padding",
)
FORKED, TRUNCATED, GREEDY = (
    "forked cache == full forward",
    "truncated cache == full forward",
    "greedy decoding == full forward",
)
BATCHED, KERNELS = "batch == single sequence", "C++ kernels == PyTorch modules"

CONTROLS = [
    (PREFIX, Control(replaced(context, "make_mask", attends_everywhere), BATCHED)),
    (BATCHED, Control(replaced(attend, "scaled_dot_product_attention", reads_keys_of_another_sequence), PREFIX)),
    (LEFT, Control(replaced(masks, "positions_from_mask", counts_left_padding), RIGHT, "gpt2")),
    (RIGHT, Control(replaced(masks, "positions_from_mask", counts_right_padding), LEFT, "gpt2")),
    (
        "fused attention == reference attention",
        Control(replaced(attend, "scaled_dot_product_attention", scales_scores_differently), CACHED),
    ),
    (
        "absorbed latent attention == unfolded",
        Control(replaced(LatentAttentionLayer, "attend_absorbed", forgets_the_rotation), PREFIX, "deepseek"),
    ),
    (
        "precomputed cross-attention == computed",
        Control(replaced(Transformer, "precompute_cross_attention", swaps_layers), LEFT, "t5"),
    ),
    (CACHED, Control(replaced(KeyValueCache, "prepare", restarts_positions), LEFT)),
    (
        CACHED,
        Control(replaced(LatentAttentionLayer, "attend_absorbed", forgets_the_rotation), LEFT, "deepseek"),
    ),
    (CONTIGUOUS, Control(replaced(ContiguousStore, "write", returns_stale_keys), SLIDING, "mistral")),
    (SLIDING, Control(replaced(SlidingStore, "ring_indices", shifts_the_ring_by_one), CONTIGUOUS, "mistral")),
    (SLIDING, Control(replaced(SlidingStore, "__init__", has_one_slot_too_few), CONTIGUOUS, "llama4")),
    ("paged cache == full forward", Control(replaced(PageStorage, "copy_page", copies_nothing), CONTIGUOUS)),
    (
        "chunked prefill == full forward",
        Control(replaced(decoding, "forward_step", masks_only_the_first_chunk), FORKED),
    ),
    (FORKED, Control(replaced(KeyValueCache, "fork", returns_the_original), TRUNCATED, "gemma3")),
    (TRUNCATED, Control(replaced(KeyValueCache, "truncate", does_not_truncate), FORKED, "gemma3")),
    (
        "saved and loaded cache == full forward",
        Control(replaced(ContiguousStore, "restore", swaps_keys_and_values), FORKED),
    ),
    (
        "saved and loaded cache == full forward",
        Control(replaced(SlidingStore, "restore", swaps_keys_and_values), FORKED, "mistral"),
    ),
    ("reordered cache == full forward", Control(replaced(ContiguousStore, "select", reverses_the_order), FORKED)),
    (GREEDY, Control(replaced(decoding, "next_tokens", takes_the_second_best), CACHED)),
    ("batched greedy decoding == full forward", Control(replaced(KeyValueCache, "select", reverses_the_order), GREEDY)),
    (
        "batched greedy decoding == full forward",
        Control(replaced(decoding, "forward_step", masks_nothing), GREEDY, "bloom"),
    ),
    (
        "speculative decoding == greedy decoding",
        Control(replaced(speculative, "accept_draft", accepts_every_draft), GREEDY),
    ),
    ("engine == full forward", Control(replaced(PackedLayout, "documents", mixes_sequences), GREEDY)),
    ("engine == full forward", Control(replaced(PageStorage, "write", writes_one_slot_off), GREEDY, "mistral")),
    ("text among others == text alone", Control(replaced(Runner, "logits", depends_on_the_number_of_rows), GREEDY)),
    (KERNELS, Control(replaced(lowering, "make_rotation", rotates_too_far), CACHED)),
    (KERNELS, Control(replaced(attention_inputs, "make_mask", ignores_the_window), SLIDING, "mistral")),
    (KERNELS, Control(replaced(attention_inputs, "cross_attention_mask", ignores_the_source_mask), CACHED, "bart")),
    ("8-bit weights ~ full weights", Control(replaced(sensitivity, "pack", uses_another_zero_point), CACHED)),
    ("4-bit weights ~ full weights", Control(replaced(sensitivity, "pack", uses_another_zero_point), CACHED)),
    (
        "torch.compile == eager",
        Control(replaced(forward_checks.torch, "compile", rounds_to_half_precision), PREFIX, compiles=True),
    ),
    ("Clearhead == transformers", Control(replaced(positions, "rope_frequencies", rotates_faster), CACHED)),
]


@pytest.mark.parametrize(("check", "control"), CONTROLS, ids=[name for name, _ in CONTROLS])
def test_a_defect_fails_its_check_and_no_unrelated_one(check, control, monkeypatch):
    if check == KERNELS and not kernels_available():
        pytest.skip("there is no compiler for the kernels")
    control.break_it(monkeypatch)
    case = VerificationCase.create(toy_model(control.style), num_new_tokens=24, compiles=control.compiles)
    failed = run_check(check, CHECKS[check], case)
    assert failed.verdict == "fail"
    assert failed.difference > (3 if " == " in check else 2) * failed.tolerance
    assert run_check(control.unaffected, CHECKS[control.unaffected], case).verdict == "pass"


def test_every_check_has_a_control():
    assert {name for name, _ in CONTROLS} == set(CHECKS)

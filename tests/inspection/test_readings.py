"""Readings: on patterns that are known, against the network with parts really taken away, and as sums."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import kl_div, log_softmax

import clearhead
from clearhead.api import Model
from clearhead.architecture import DeviationNorm, Dropout, LayerNorm, Rope
from clearhead.backends.cpu.stack import accelerate
from clearhead.backends.packed.modules import pack_network
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.inspection.ablation import ablate
from clearhead.inspection.attribution import attribute
from clearhead.inspection.effect import Effect
from clearhead.inspection.heads import Heads
from clearhead.inspection.lens import logit_lens
from clearhead.inspection.patching import patch, restoration
from clearhead.inspection.readings import attention_entropy, induction_scores, previous_token_scores, rollout
from clearhead.inspection.trace import Trace
from clearhead.model.attend import Scoring
from clearhead.model.masks import Mask
from clearhead.model.transformer import Transformer
from clearhead.training.objective import recompute_blocks
from tests.book.shrink import shrink
from tests.model.toys import close, decoder, encoder, stack, toy, translator

TOKENS, OTHER, SOURCE = [3, 14, 15, 9, 2, 6, 5, 3], [3, 14, 15, 8, 2, 6, 5, 3], [2, 7, 18, 28, 1]
SUMS = ("gpt2", "llama-3.1-8b", "gemma-3-1b", "palm-540b", "deepseek-v3", "bloom-560m", "t5-small", "grok-1")


def trace_of(name, tokens=TOKENS):
    model = Model(toy(shrink(preset(name))))
    return model.trace(tokens, SOURCE if model.config.is_encoder_decoder else None)


def looking(rows):
    """A trace of two layers with one weight pattern (T, T) in every head: scores that are its logarithm."""
    weights = torch.tensor(rows, dtype=torch.float64)
    length = len(weights)
    one_hot = torch.eye(length, dtype=torch.float64)[None, None].expand(1, 4, -1, -1)
    how = Scoring(mask=Mask(causal=True), scale=1.0)
    heads = Heads(weights.clamp(min=1e-300).log()[None, None].expand(1, 4, -1, -1), one_hot, one_hot, how)
    states = dict.fromkeys(range(3), torch.zeros(length, 16))
    texts = [str(token) for token in range(length)]
    return Trace(decoder(), list(range(length)), texts, {"decoder": states}, heads={"decoder": [heads] * 2})


THIRDS = [[1.0, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]]
BEFORE = [[1.0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0.2, 0, 0.8, 0]]


def test_entropy_of_known_weights():
    expected = torch.tensor([0.0, math.log(2), math.log(3)])
    close(attention_entropy(looking(THIRDS), 0), expected.expand(4, 3), 1e-6)
    close(attention_entropy(looking(BEFORE), 1)[0, :3], torch.zeros(3), 1e-6)


def test_heads_that_look_back_by_one():
    for layer in previous_token_scores(looking(BEFORE)):
        close(layer, torch.full((4,), (1 + 1 + 0.8) / 3, dtype=torch.float64))
    with pytest.raises(ClearheadError, match="needs two"):
        previous_token_scores(Model(toy(decoder())).trace([1]))


def test_heads_of_induction():
    """7 1 2 7 1: the second 7 may look at 1 (place 1), the second 1 at 2 (place 2)."""
    rows = torch.eye(5)
    rows[3] = torch.tensor([0.0, 0.6, 0, 0.4, 0])
    rows[4] = torch.tensor([0.0, 0, 1, 0, 0])
    traced = replace(looking(rows.tolist()), tokens=[7, 1, 2, 7, 1])
    for layer in induction_scores(traced):
        close(layer, torch.full((4,), 0.8, dtype=torch.float64), 1e-6)
    with pytest.raises(ClearheadError, match="no token occurs twice"):
        induction_scores(replace(traced, tokens=[0, 1, 2, 3, 4]))


def test_rollout_of_two_layers():
    step = (torch.tensor(THIRDS) + torch.eye(3)) / 2
    found = rollout(looking(THIRDS))
    close(found, step @ step, 1e-6)
    close(found.sum(dim=1), torch.ones(3), 1e-6)
    source = rollout(Model(toy(translator())).trace(TOKENS, SOURCE), stack="encoder")
    assert source.shape == (5, 5)


# --- the lens


@pytest.mark.parametrize("name", ["gpt2", "gemma-3-1b", "palm-540b", "t5-small", "bert-base"])
def test_the_lens_ends_in_what_the_model_says(name):
    traced = trace_of(name)
    rows = logit_lens(traced, top=3)
    assert [(row.layer, row.after) for row in rows[-2:]] == [
        (traced.num_layers - 1, "attention"),
        (traced.num_layers - 1, "feed_forward"),
    ]
    said = traced.logits.float().softmax(dim=-1).topk(3)
    assert torch.equal(rows[-1].top_ids, said.indices)
    close(rows[-1].top_probabilities, said.values, 1e-6)
    middle = traced.compute_logits(traced.middle(1)).float().softmax(dim=-1)
    close(rows[2].top_probabilities, middle.topk(3).values, 1e-6)
    close(rows[2].entropy, -(middle * middle.log()).sum(dim=-1), 1e-5)


def test_the_lens_always_keeps_the_last_layer():
    traced = trace_of("gpt2")
    assert traced.num_layers == 8
    for every, layers in {1: list(range(8)), 3: [1, 4, 7], 5: [2, 7], 100: [7]}.items():
        assert [row.layer for row in logit_lens(traced, every=every, rows=[-1])] == [n for n in layers for _ in "ab"]
    assert logit_lens(traced, top=2, rows=[-1, 0])[0].top_ids.shape == (2, 2)
    assert logit_lens(traced, top=2, rows=[])[0].top_ids.shape == (0, 2)
    for wrong in ({"top": 0}, {"top": 30}, {"every": 0}, {"rows": [8]}):
        with pytest.raises(ClearheadError):
            logit_lens(traced, **wrong)


# --- attribution


@pytest.mark.parametrize("name", SUMS)
def test_shares_add_up_to_the_logit(name):
    traced = trace_of(name)
    for position in (-1, 2):
        logits = traced.logits[position]
        cap = traced.config.head.softcap
        logits = logits if cap is None else cap * torch.atanh(logits / cap)
        found = attribute(traced, token=11, position=position)
        assert found.logit == pytest.approx(logits[11].item(), abs=1e-9)
        assert attribute(traced, 11, position, against=4).logit == pytest.approx(
            (logits[11] - logits[4]).item(), abs=1e-9
        )
    by_head = attribute(traced, 11, by_head=True)
    assert by_head.logit == pytest.approx(traced_logit(traced, 11), abs=1e-9)
    assert sum(share.head is not None for share in by_head.shares) == 4 * traced.num_layers
    whole = {share.layer: share.logit for share in attribute(traced, 11).shares if share.part == "attention"}
    for layer, logit in whole.items():
        parts = [share.logit for share in by_head.shares if (share.part, share.layer) == ("attention", layer)]
        assert sum(parts) == pytest.approx(logit, abs=1e-9)


def traced_logit(traced, token):
    logit, cap = traced.logits[-1, token], traced.config.head.softcap
    return (logit if cap is None else cap * torch.atanh(logit / cap)).item()


@pytest.mark.parametrize("norm", [LayerNorm(epsilon=0.1), LayerNorm(epsilon=0.1, bias=False), None], ids=str)
def test_shares_under_other_last_norms(norm):
    config = decoder(position=Rope())
    traced = Model(toy(replace(config, decoder=replace(config.decoder, final_norm=norm)))).trace(TOKENS)
    assert attribute(traced, 5).logit == pytest.approx(traced.logits[-1, 5].item(), abs=1e-9)


def test_the_share_of_a_part_is_what_its_absence_takes_under_the_same_divisor():
    """Without a last norm there is no divisor, so the last feed-forward's share is exactly the logit it moves."""
    config = decoder(position=Rope())
    traced = Model(toy(replace(config, decoder=replace(config.decoder, final_norm=None)))).trace(TOKENS)
    share = next(s for s in attribute(traced, 5).shares if (s.part, s.layer) == ("feed_forward", 1))
    without = traced.compute_logits(traced.middle(1))[-1, 5].item()
    assert share.logit == pytest.approx(traced.logits[-1, 5].item() - without, abs=1e-9)
    largest = attribute(traced, 5).largest(3)
    assert abs(largest[0].logit) >= abs(largest[1].logit) >= abs(largest[2].logit)


def test_shares_of_a_stream_whose_squares_overflow_half_precision():
    network = toy(decoder(position=Rope())).float()
    with torch.no_grad():
        network.decoder.layers[1].feed_forward.down.weight.mul_(2000.0)
    traced = Model(network.half()).trace(TOKENS)
    assert traced.residual(2).square().mean().isinf()
    assert attribute(traced, 5, by_head=True).logit == pytest.approx(traced.logits[-1, 5].item(), rel=0.01)


@pytest.mark.parametrize("norm", [LayerNorm(epsilon=0.1), DeviationNorm(epsilon=0.1)], ids=str)
def test_shares_under_a_norm_with_a_bias_in_half_precision(norm):
    config = decoder(position=Rope())
    network = toy(replace(config, decoder=replace(config.decoder, final_norm=norm)), torch.bfloat16)
    traced = Model(network).trace(TOKENS)
    assert attribute(traced, 5, by_head=True).logit == pytest.approx(traced.logits[-1, 5].item(), rel=0.03)


def test_where_logits_are_no_sum():
    post = Model(toy(replace(decoder(), decoder=stack(decoder().decoder.layers[0].attention, placement="post"))))
    with pytest.raises(ClearheadError, match="its stream is no sum"):
        attribute(post.trace(TOKENS), 5)
    with pytest.raises(ClearheadError, match="no head"):
        attribute(trace_of("bert-base"), 5)
    with pytest.raises(ClearheadError, match="token 29 is out of range"):
        attribute(Model(toy(decoder())).trace(TOKENS), 29)


# --- taking parts away


def last_logits(network, tokens=TOKENS):
    with torch.no_grad():
        return network(torch.tensor([tokens]))[0, -1]


def same_effect(effect, before, after):
    close(effect.before, log_softmax(before.float(), dim=-1), 1e-5)
    close(effect.after, log_softmax(after.float(), dim=-1), 1e-5)
    expected = kl_div(effect.after, effect.before, reduction="sum", log_target=True).item()
    assert effect.divergence == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "gemma-3-1b", "palm-540b"])
def test_without_a_head_is_as_with_zeros_in_the_last_matrix(name):
    traced = trace_of(name)
    without = deepcopy(traced.network)
    output = without.decoder.layers[1].attention.output
    width = output.in_features // 4
    with torch.no_grad():
        output.weight[:, 2 * width : 3 * width] = 0
    effect = ablate(traced, layer=1, head=2)
    same_effect(effect, last_logits(traced.network), last_logits(without))
    assert effect.divergence > 1e-6


def test_packed_weights_are_ablated_but_not_shared_out():
    network = toy(shrink(preset("llama-3.1-8b")), torch.bfloat16)
    pack_network(network, "int8")
    traced = Model(network).trace(TOKENS)
    assert ablate(traced, layer=1, head=2).divergence > 0
    with pytest.raises(ClearheadError, match="the weights of this model are packed"):
        attribute(traced, 5)


@pytest.mark.parametrize("part", ["attention", "feed_forward"])
def test_without_a_branch_is_as_with_zeros_in_its_last_matrix(part):
    traced = trace_of("llama-3.1-8b")
    without = deepcopy(traced.network)
    last = getattr(without.decoder.layers[0], part)
    torch.nn.init.zeros_(last.output.weight if part == "attention" else last.down.weight)
    same_effect(ablate(traced, 0, part=part), last_logits(traced.network), last_logits(without))


def test_without_a_layer_is_the_network_without_it():
    traced = trace_of("gpt2")
    config = traced.config
    layers = config.decoder.layers
    shorter = Transformer(replace(config, decoder=replace(config.decoder, layers=layers[:2] + layers[3:]))).double()
    tensors = traced.network.state_dict()
    kept = [number for number in range(len(layers)) if number != 2]
    for name in shorter.state_dict():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(kept[int(parts[2])])
        shorter.state_dict()[name].copy_(tensors[".".join(parts)])
    same_effect(ablate(traced, 2), last_logits(traced.network), last_logits(shorter.eval()))


def test_a_mean_takes_away_what_differs_between_tokens():
    traced = Model(toy(decoder(position=Rope()))).trace([7] * 6)
    assert ablate(traced, 0, head=1, by="mean").divergence == pytest.approx(0.0, abs=1e-6)  # all tokens alike
    assert ablate(traced, 0, head=1).divergence > 1e-4
    varied = trace_of("llama-3.1-8b")
    assert ablate(varied, 1, by="mean").divergence > 1e-6
    assert ablate(varied, 1, part="feed_forward", by="mean").divergence > 1e-6


@pytest.mark.parametrize("fast", [False, True])
def test_ablation_sees_through_compile(fast):
    network = toy(decoder(position=Rope()), torch.float32)
    assert not fast or accelerate(network, build=True)
    traced = Model(network).trace(TOKENS)
    expected = ablate(traced, 0, head=1)
    assert expected.divergence > 1e-4
    traced.network.decoder.compile(backend="eager")
    traced.run_again(-1)
    close(ablate(traced, 0, head=1).after, expected.after, 1e-6)


@pytest.mark.parametrize("part", ["stream", "attention", "feed_forward"])
def test_ablation_in_the_middle_of_training(part):
    traced = Model(toy(replace(decoder(), dropout=Dropout(attention=0.5)))).trace(TOKENS)
    expected = ablate(traced, 0, part=part)
    recompute_blocks(traced.network.train())
    close(ablate(traced, 0, part=part).after, expected.after, 1e-6)


def test_the_encoder_of_a_translator():
    traced = Model(toy(translator())).trace(TOKENS, SOURCE)
    assert ablate(traced, 1, head=0, stack="encoder").divergence > 1e-6


def test_the_likeliest_before_and_after():
    effect = Effect.of(torch.tensor([2.0, 1.0, 0.0]).log1p(), torch.tensor([0.0, 1.0, 5.0]).log1p())
    assert effect.top_before(2) == [(0, pytest.approx(3 / 6)), (1, pytest.approx(2 / 6))]
    assert effect.top_after()[0] == (2, pytest.approx(6 / 9))
    assert effect.gain(2) == pytest.approx(math.log(6 / 9) - math.log(1 / 6))
    expected = sum(p * math.log(p / q) for p, q in zip((3 / 6, 2 / 6, 1 / 6), (1 / 9, 2 / 9, 6 / 9), strict=True))
    assert effect.divergence == pytest.approx(expected)
    with pytest.raises(ClearheadError, match="token 3 is out of range"):
        effect.gain(3)


WRONG = {
    "layer 9 is out of range": {"layer": 9},
    "head 4 is out of range": {"layer": 0, "head": 4},
    "heads are parts of attention": {"layer": 0, "head": 1, "part": "feed_forward"},
    "unknown part 'attentoin'; did you mean 'attention'": {"layer": 0, "part": "attentoin"},
    "unknown way to ablate": {"layer": 0, "by": "noise"},
    "position 8 is out of range": {"layer": 0, "position": 8},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_ablations(message):
    with pytest.raises(ClearheadError, match=message):
        ablate(Model(toy(decoder())).trace(TOKENS), **WRONG[message])


# --- patching


@pytest.mark.parametrize("name", ["gpt2", "gemma-3-1b", "deepseek-v3", "t5-small"])
def test_all_of_the_stream_gives_all_of_the_answer(name):
    clean = trace_of(name)
    corrupted = Model(clean.network).trace(OTHER, clean.source_tokens)
    for layer in (0, clean.num_layers - 1):
        effect = patch(clean, corrupted, layer)
        close(effect.after, log_softmax(clean.logits[-1].float(), dim=-1), 1e-5)
        close(effect.before, log_softmax(corrupted.logits[-1].float(), dim=-1), 1e-5)
    assert patch(clean, corrupted, 0, places=[0, 1, 2]).divergence == pytest.approx(0.0, abs=1e-6)  # equal so far
    close(patch(clean, corrupted, 0, places=[3]).after, effect.after, 1e-5)  # the one that differs


def test_one_head_put_in():
    """The stream then has the clean head's output in place of its own; checked by hand through the last matrix."""
    model = Model(toy(decoder(position=Rope())))
    clean, corrupted = model.trace(TOKENS), model.trace(OTHER)
    weights = corrupted.network.decoder.layers[1].attention.output.weight[:, 4:8]  # head 1
    given = [one.self_heads(1).attended.output[0, 1] @ weights.T for one in (clean, corrupted)]
    effect = patch(clean, corrupted, 1, places=[-1], head=1)
    block = model.network.decoder.layers[1]
    with torch.no_grad():
        middle = corrupted.middle(1)[-1] + (given[0] - given[1])[-1]
        logits = corrupted.compute_logits(middle + block.feed_forward(block.feed_forward_residual.norm(middle)))
    close(effect.after, log_softmax(logits.float(), dim=-1), 1e-5)
    assert effect.divergence > 1e-6


def test_where_the_answer_is_carried():
    """In one layer without a look at other tokens nothing but the last place matters."""
    model = Model(toy(decoder(position=Rope())))
    clean, corrupted = model.trace(TOKENS), model.trace(OTHER)
    gains = restoration(clean, corrupted, token=5)
    assert gains.shape == (2, 8)
    close(gains[:, :3], torch.zeros(2, 3), 1e-6)  # tokens before the difference are the same in both
    whole = patch(clean, corrupted, 0).gain(5)
    assert gains[0, 3].item() == pytest.approx(whole, abs=1e-5)
    assert patch(clean, corrupted, 1, [2], part="feed_forward").divergence == pytest.approx(0.0, abs=1e-6)


def test_wrong_pairs():
    model = Model(toy(decoder()))
    with pytest.raises(ClearheadError, match="8 and 3 tokens"):
        patch(model.trace(TOKENS), model.trace([1, 2, 3]), 0)
    with pytest.raises(ClearheadError, match="different models"):
        patch(model.trace(TOKENS), Model(toy(decoder())).trace(TOKENS), 0)


@pytest.mark.download
def test_patterns_in_real_weights(smollm2_gguf):
    """SmolLM2 has heads that look back by one and heads of induction, and settles on its word in its upper half."""
    model = clearhead.load(smollm2_gguf)
    drawn = torch.randint(100, 40_000, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    twice = model.trace([*drawn, *drawn])
    assert max(scores.max() for scores in induction_scores(twice)) > 0.5
    assert max(scores.max() for scores in previous_token_scores(twice)) > 0.5
    rome = model.encode(" Rome")[0]
    clean = model.trace("The capital of France is Paris, and the capital of Italy is")
    rows = logit_lens(clean, top=1, rows=[-1])
    assert rows[-1].top_ids.item() == rome
    assert rows[9].top_ids.item() != rome
    corrupted = model.trace("The capital of France is Paris, and the capital of Spain is")
    assert patch(clean, corrupted, 1, places=[-2]).gain(rome) > 2
    assert abs(patch(clean, corrupted, 1, places=[3]).gain(rome)) < 1e-3


def test_an_encoder_alone_is_read_too():
    model = Model(toy(encoder()))
    traced = model.trace(TOKENS)
    assert rollout(traced).shape == (8, 8)
    assert rollout(traced)[0, -1] > 0

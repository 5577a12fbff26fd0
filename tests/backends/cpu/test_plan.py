"""A plan of the CPU kernels is rebuilt when weights, modules, hooks, caches or threads change."""

import math
from copy import deepcopy
from threading import Thread

import pytest
import torch
from torch import nn

import clearhead
from clearhead.architecture import Rope
from clearhead.backends.cpu.stack import accelerate
from clearhead.backends.modules import pack_network
from clearhead.cache.key_value_cache import KeyValueCache
from clearhead.cache.stores import ContiguousStore
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.inspection.tracing import trace_generation
from clearhead.model.transformer import Transformer
from clearhead.training.lora import Lora, add_lora, merge_lora
from tests.backends.networks import logits_of, toy_network, with_attention
from tests.model.toys import VOCAB, redraw
from tests.toy_presets import shrink

TOKENS = torch.randint(0, VOCAB, (2, 70), generator=torch.Generator().manual_seed(3))


pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture
def fast():
    """Return an accelerated network that has already built a plan."""
    network = toy_network("llama-3.1-8b")
    accelerate(network)
    logits_of(network, TOKENS[:, :8])
    assert network.decoder.plan is not None
    return network


def plain_copy(network):
    """Return a network with the same weights that runs in the modules only."""
    copy = Transformer(network.config).eval()
    copy.load_state_dict(network.state_dict())
    return copy


def assert_same_logits(network, plain, tokens=TOKENS[:, :9]):
    torch.testing.assert_close(logits_of(network, tokens)[0], logits_of(plain, tokens)[0], atol=2e-4, rtol=1e-4)


# --- every length and every kind of layer


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "mistral-7b", "gemma-3-1b", "qwen3-8b"])
def test_single_tokens_up_to_a_length_of_seventy(name, num_threads):
    """Beyond the first span of 32 slots, the ring buffer of a window, and the first doubling of a buffer."""
    network = toy_network(name)
    fast, before = deepcopy(network), torch.get_num_threads()
    accelerate(fast)
    torch.set_num_threads(num_threads)
    try:
        found, _ = logits_of(fast, TOKENS, prompt_length=1)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, logits_of(network, TOKENS, prompt_length=1)[0], atol=2e-4, rtol=1e-4)


def test_a_window_is_respected_in_a_contiguous_cache():
    network = toy_network("mistral-7b")
    fast = deepcopy(network)
    accelerate(fast)
    logits = []
    for model in (network, fast):
        cache = KeyValueCache(model.config, stores=[ContiguousStore() for _ in model.config.decoder.layers])
        with torch.no_grad():
            model.hidden_states(TOKENS[:, :40], cache=cache)
            cache.advance()
            logits.append(model.compute_logits(model.hidden_states(TOKENS[:, 40:41], cache=cache)))
    torch.testing.assert_close(logits[1], logits[0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("rope", [Rope(width=2), Rope(pairing="interleaved"), Rope(width=2, pairing="interleaved")])
def test_partial_and_interleaved_rotations(rope):
    network = Transformer(with_attention(shrink(preset("llama-3.1-8b")), position=rope)).eval()
    redraw(network)
    fast = deepcopy(network)
    assert accelerate(fast)
    assert_same_logits(fast, network)


@pytest.mark.parametrize("batch", [1, 2, 4, 5, 16, 17, 48, 49])
def test_the_batch_size_may_change_from_call_to_call(fast, batch):
    tokens = torch.randint(0, VOCAB, (batch, 9))
    assert_same_logits(fast, plain_copy(fast), tokens)
    assert_same_logits(fast, plain_copy(fast))


# --- weights and modules that change


def test_weights_changed_in_place_take_effect(fast):
    with torch.no_grad():
        for parameter in fast.decoder.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    assert_same_logits(fast, plain_copy(fast))


def test_a_change_within_a_sequence_takes_effect_when_several_tokens_are_processed(fast):
    _, cache = logits_of(fast, TOKENS[:, :8])
    with torch.no_grad():
        fast.decoder.final_norm.weight.mul_(2.0)
        found, expected = (network(TOKENS[:, 8:10], cache=cache.fork()) for network in (fast, plain_copy(fast)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma-3-1b", "gpt2"])
def test_changes_of_norms_and_biases_that_the_plan_copies_take_effect(name):
    """Gemma's norms are stored as their distance from 1; GPT-2 has biases, which are merged."""
    network = toy_network(name)
    accelerate(network)
    before, _ = logits_of(network, TOKENS[:, :8])
    other = toy_network(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.3)
    network.load_state_dict(other.state_dict())
    assert_same_logits(network, other)
    assert not torch.allclose(logits_of(network, TOKENS[:, :8])[0], before)


def replace_parameter(layer):
    layer.feed_forward.up.weight = nn.Parameter(2 * layer.feed_forward.up.weight.detach())


def replace_data(layer):
    layer.attention.query.weight.data = 2 * layer.attention.query.weight.data


def cast_and_change(layer):
    layer.double().float()
    layer.feed_forward.down.weight.data.mul_(2)


@pytest.mark.parametrize("change", [replace_parameter, replace_data, cast_and_change])
def test_a_weight_at_another_address_takes_effect(fast, change):
    change(fast.decoder.layers[0])
    assert_same_logits(fast, plain_copy(fast))


def test_weights_assigned_from_a_state_dict_take_effect(fast):
    other = {name: 1.3 * tensor for name, tensor in plain_copy(fast).state_dict().items()}
    fast.load_state_dict(other, assign=True)
    assert_same_logits(fast, plain_copy(fast))


def test_a_replaced_final_norm_and_reordered_layers_take_effect(fast):
    plain = plain_copy(fast)
    for network in (fast, plain):
        network.decoder.final_norm = nn.Identity()
        network.decoder.layers = nn.ModuleList(reversed(network.decoder.layers))
    assert_same_logits(fast, plain)
    assert fast.decoder.plan is not None


def test_an_optimizer_created_before_the_first_step_still_trains_the_network():
    network = toy_network("llama-3.1-8b")
    accelerate(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    parameter_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    with torch.inference_mode():
        logits_of(network, TOKENS[:, :8])
    assert {id(parameter) for parameter in network.parameters()} == parameter_ids
    assert all(parameter.requires_grad for parameter in network.parameters())
    network(TOKENS[:, :8]).square().mean().backward()
    assert all(parameter.grad is not None for parameter in network.decoder.layers.parameters())
    optimizer.step()
    assert_same_logits(network, plain_copy(network))


def test_a_step_with_gradients_enabled_can_be_differentiated(fast):
    cache = KeyValueCache(fast.config)
    fast(TOKENS[:, :1], cache=cache).sum().backward()
    assert fast.decoder.layers[0].attention.query.weight.grad is not None


@pytest.mark.parametrize("whole_network", [True, False])
def test_active_dropout_is_applied(fast, whole_network):
    """Also if only the dropout module is in training mode, as for estimates of a model's uncertainty."""
    dropout = fast.decoder.layers[0].attention_residual.dropout
    (fast if whole_network else dropout).train()
    dropout.p = 0.5
    with torch.no_grad():
        first, second = (fast(TOKENS[:, :1], cache=KeyValueCache(fast.config)) for _ in range(2))
    assert not torch.equal(first, second)


def test_a_copy_does_not_share_the_plan(fast):
    copy = deepcopy(fast)
    with torch.no_grad():
        copy.decoder.layers[0].feed_forward.up.weight.zero_()
    assert_same_logits(fast, plain_copy(fast))
    assert_same_logits(copy, plain_copy(copy))


def test_a_network_cast_to_float64_runs_in_the_modules(fast):
    fast.double()
    found, cache = logits_of(fast, TOKENS[:, :8])
    assert cache.stores[0].key.dtype == torch.float64
    assert fast.decoder.plan is None
    torch.testing.assert_close(found.double(), logits_of(plain_copy(fast).double(), TOKENS[:, :8])[0].double())


def test_lora_modules_are_not_bypassed(fast):
    add_lora(fast, Lora(rank=2))
    with torch.no_grad():
        for name, parameter in fast.named_parameters():
            if name.endswith("expand"):
                parameter.fill_(0.1)
    logits, _ = logits_of(fast, TOKENS[:, :8])
    assert fast.decoder.plan is None
    merge_lora(fast)
    torch.testing.assert_close(logits_of(fast, TOKENS[:, :8])[0], logits, atol=2e-4, rtol=1e-4)
    assert fast.decoder.plan is not None


def test_packing_an_accelerated_network_takes_effect(fast):
    expected, _ = logits_of(pack_network(plain_copy(fast), "int4"), TOKENS[:, :8])
    found, _ = logits_of(pack_network(fast, "int4"), TOKENS[:, :8])
    assert (found - expected).norm() / expected.norm() < 0.05


def test_forward_hooks_are_called_and_their_removal_takes_effect(fast):
    calls = []
    handle = fast.decoder.layers[0].feed_forward.register_forward_hook(lambda *arguments: calls.append(1))
    logits_of(fast, TOKENS[:, :8])
    assert len(calls) == 4  # the prompt and three steps
    handle.remove()
    logits_of(fast, TOKENS[:, :8])
    assert fast.decoder.plan is not None


def test_tracing_a_generation_records_every_token(fast):
    trace = trace_generation(clearhead.Model(fast).text_generator, [1, 2, 3], max_new_tokens=5, temperature=0)
    assert len(trace.tokens) == 7


def test_a_compiled_network_gives_the_logits_of_the_modules(fast):
    network = torch.compile(fast, backend="eager")
    with torch.no_grad():
        found = network(TOKENS[:, :1], cache=KeyValueCache(fast.config))
    torch.testing.assert_close(
        found, logits_of(plain_copy(fast), TOKENS[:, :1], prompt_length=1)[0], atol=1e-4, rtol=1e-4
    )


# --- caches and encoder outputs that do not fit


def run_step(network, tokens, cache, **options):
    with torch.no_grad():
        return network.hidden_states(tokens, cache=cache, **options)


def test_a_cache_of_another_batch_size_is_refused(fast):
    cache = KeyValueCache(fast.config)
    run_step(fast, TOKENS[:1, :1], cache)
    cache.truncate(0)
    with pytest.raises(ClearheadError, match="the cache holds 1 sequences, but the input has 3"):
        run_step(fast, torch.zeros(3, 1, dtype=torch.long), cache)


def test_a_cache_may_reuse_the_memory_of_a_longer_one(fast):
    """Freed memory: it begins at the same address, but its heads have another stride."""
    longer, shorter = KeyValueCache(fast.config), KeyValueCache(fast.config)
    run_step(fast, torch.zeros(2, 70, dtype=torch.long), longer)
    expected = run_step(fast, TOKENS[:, :5], longer)
    for old, new in zip(longer.stores, shorter.stores, strict=True):
        batch, heads, _, width = old.key.shape
        shape = (batch, heads, new.capacity, width)
        new.key, new.value = (part.flatten()[: math.prod(shape)].view(shape) for part in (old.key, old.value))
    torch.testing.assert_close(run_step(fast, TOKENS[:, :5], shorter), expected)
    shorter.advance()
    found = run_step(fast, TOKENS[:, 5:6], shorter)
    torch.testing.assert_close(found, run_step(plain_copy(fast), TOKENS[:, :6], None)[:, -1:], atol=1e-4, rtol=1e-4)


def test_replaced_buffers_with_less_capacity_than_the_others_are_noticed(fast):
    cache = KeyValueCache(fast.config)
    run_step(fast, TOKENS[:, :5], cache)
    cache.advance()
    store = cache.stores[1]
    old, store.capacity = (store.key, store.value), 6
    store.key, store.value = (part[:, :, :6].clone() for part in old)
    for position in range(5, 9):
        found = run_step(fast, TOKENS[:, position : position + 1], cache)
        cache.advance()
    assert store.key.shape[2] == 12
    assert not any(part[:, :, 5:].any() for part in old)  # nothing was written to the old buffers
    torch.testing.assert_close(found, run_step(plain_copy(fast), TOKENS[:, :9], None)[:, -1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_new", [1, 2])
def test_nan_in_a_cached_key_reaches_the_output(fast, num_new):
    cache = KeyValueCache(fast.config)
    run_step(fast, TOKENS[:, :4], cache)
    cache.advance()
    cache.stores[0].key[:, :, 1] = torch.nan
    assert run_step(fast, TOKENS[:, 4 : 4 + num_new], cache).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cache_of_another_dtype_is_refused(fast, dtype):
    cache = KeyValueCache(fast.config)
    run_step(fast, TOKENS[:, :1], cache)
    cache.advance()
    for store in cache.stores:
        store.key, store.value = store.key.to(dtype), store.value.to(dtype)
    with pytest.raises(ClearheadError, match="start with a new cache"):
        run_step(fast, TOKENS[:, 1:2], cache)
    fresh = KeyValueCache(fast.config)
    run_step(fast, TOKENS[:, :1], fresh)
    assert fresh.stores[0].key is not None  # written to the new cache, not to the refused one


def test_an_encoder_decoder_without_encoder_output_is_refused():
    network = toy_network("bart-base")
    accelerate(network)
    with pytest.raises(ClearheadError, match="it needs encoder_output"):
        run_step(network, TOKENS[:, :1], KeyValueCache(network.config))


def test_an_encoder_output_for_a_decoder_only_model_is_refused(fast):
    bart = toy_network("bart-base")
    with torch.no_grad():
        encoder_output = bart.precompute_cross_attention(bart.encode(TOKENS[:, :4]))
    with pytest.raises(ClearheadError, match="leave out encoder_output"):
        run_step(fast, TOKENS[:, :1], KeyValueCache(fast.config), encoder_output=encoder_output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((TOKENS[0, :1],), "must be \\(batch, length\\)"),
        ((TOKENS[:, :1], torch.ones(2, 9)), "mask has shape"),
        ((TOKENS[:, :1].float(),), "tokens must be int64 or int32"),
        ((TOKENS[:, :1] + VOCAB,), "out of range"),
    ],
)
def test_invalid_inputs_are_refused_as_by_the_modules(fast, arguments, message):
    with torch.no_grad(), pytest.raises(ClearheadError, match=message):
        fast.hidden_states(*arguments, cache=KeyValueCache(fast.config))


def test_two_threads_may_decode_at_the_same_time(fast):
    batches = [torch.randint(0, VOCAB, (1, 60)) for _ in range(2)]
    expected, found = [logits_of(fast, tokens)[0] for tokens in batches], {}

    def decode_three_times(number):
        found[number] = [logits_of(fast, batches[number])[0] for _ in range(3)]

    threads = [Thread(target=decode_three_times, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        for logits in found[number]:
            torch.testing.assert_close(logits, expected[number], atol=1e-5, rtol=1e-5)

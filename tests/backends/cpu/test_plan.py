"""What a step must notice: modules, weights, caches and threads that are not what they were when it was planned."""

import math
from copy import deepcopy
from dataclasses import replace
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
from tests.backends.cpu.test_stack import logits_of, network_of
from tests.book.shrink import shrink
from tests.model.toys import VOCAB, redraw

TOKENS = torch.randint(0, VOCAB, (2, 70), generator=torch.Generator().manual_seed(3))


pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture
def fast():
    """An accelerated network that has made a step."""
    network = network_of("llama-3.1-8b")
    accelerate(network)
    logits_of(network, TOKENS[:, :8])
    assert network.decoder.plan is not None
    return network


def twin_of(network):
    """The same weights in modules alone."""
    twin = Transformer(network.config).eval()
    twin.load_state_dict(network.state_dict())
    return twin


def assert_same(network, twin, tokens=TOKENS[:, :9]):
    torch.testing.assert_close(logits_of(network, tokens)[0], logits_of(twin, tokens)[0], atol=2e-4, rtol=1e-4)


# --- every length, every kind


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "mistral-7b", "gemma-3-1b", "qwen3-8b"])
def test_every_length_up_to_seventy(name, num_threads):
    """Past the first span of 32, past the ring of a window, and past the first doubling of a buffer."""
    network = network_of(name)
    fast, before = deepcopy(network), torch.get_num_threads()
    accelerate(fast)
    torch.set_num_threads(num_threads)
    try:
        found, _ = logits_of(fast, TOKENS, prompt=1)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, logits_of(network, TOKENS, prompt=1)[0], atol=2e-4, rtol=1e-4)


def test_a_window_counts_also_where_all_is_kept():
    network = network_of("mistral-7b")
    fast = deepcopy(network)
    accelerate(fast)
    logits = []
    for each in (network, fast):
        cache = KeyValueCache(each.config, stores=[ContiguousStore() for _ in each.config.decoder.layers])
        with torch.no_grad():
            each.hidden_states(TOKENS[:, :40], cache=cache)
            cache.advance()
            logits.append(each.compute_logits(each.hidden_states(TOKENS[:, 40:41], cache=cache)))
    torch.testing.assert_close(logits[1], logits[0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("rope", [Rope(width=2), Rope(pairing="interleaved"), Rope(width=2, pairing="interleaved")])
def test_rotations_of_another_shape(rope):
    config = shrink(preset("llama-3.1-8b"))
    layers = [replace(layer, attention=replace(layer.attention, position=rope)) for layer in config.decoder.layers]
    network = Transformer(replace(config, decoder=replace(config.decoder, layers=tuple(layers)))).eval()
    redraw(network)
    fast = deepcopy(network)
    assert accelerate(fast)
    assert_same(fast, network)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 16, 17, 48, 49])
def test_rows_change_from_call_to_call(fast, num_rows):
    tokens = torch.randint(0, VOCAB, (num_rows, 9))
    assert_same(fast, twin_of(fast), tokens)
    assert_same(fast, twin_of(fast))


# --- weights and modules that change


def test_a_change_in_place_is_seen(fast):
    with torch.no_grad():
        for parameter in fast.decoder.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    assert_same(fast, twin_of(fast))


def test_a_change_within_a_text_is_seen_when_it_reads_on(fast):
    _, cache = logits_of(fast, TOKENS[:, :8])
    with torch.no_grad():
        fast.decoder.final_norm.weight.mul_(2.0)
        found, expected = (network(TOKENS[:, 8:10], cache=cache.fork()) for network in (fast, twin_of(fast)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma-3-1b", "gpt2"])
def test_a_change_of_what_the_plan_copies_is_seen(name):
    """Gemma's norms are stored as their distance from 1, GPT-2's biases stand together."""
    network = network_of(name)
    accelerate(network)
    before, _ = logits_of(network, TOKENS[:, :8])
    other = network_of(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.3)
    network.load_state_dict(other.state_dict())
    assert_same(network, other)
    assert not torch.allclose(logits_of(network, TOKENS[:, :8])[0], before)


def take_the_place(layer):
    layer.feed_forward.up.weight = nn.Parameter(2 * layer.feed_forward.up.weight.detach())


def move_the_data(layer):
    layer.attention.query.weight.data = 2 * layer.attention.query.weight.data


def there_and_back(layer):
    layer.double().float()
    layer.feed_forward.down.weight.data.mul_(2)


@pytest.mark.parametrize("change", [take_the_place, move_the_data, there_and_back])
def test_a_weight_elsewhere_is_seen(fast, change):
    change(fast.decoder.layers[0])
    assert_same(fast, twin_of(fast))


def test_weights_that_are_assigned_are_seen(fast):
    other = {name: 1.3 * tensor for name, tensor in twin_of(fast).state_dict().items()}
    fast.load_state_dict(other, assign=True)
    assert_same(fast, twin_of(fast))


def test_another_last_norm_and_other_layers_are_seen(fast):
    twin = twin_of(fast)
    for network in (fast, twin):
        network.decoder.final_norm = nn.Identity()
        network.decoder.layers = nn.ModuleList(reversed(network.decoder.layers))
    assert_same(fast, twin)
    assert fast.decoder.plan is not None


def test_an_optimizer_made_before_the_first_step_still_trains_the_network():
    network = network_of("llama-3.1-8b")
    accelerate(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    with torch.inference_mode():
        logits_of(network, TOKENS[:, :8])
    assert {id(parameter) for parameter in network.parameters()} == known
    assert all(parameter.requires_grad for parameter in network.parameters())
    network(TOKENS[:, :8]).square().mean().backward()
    assert all(parameter.grad is not None for parameter in network.decoder.layers.parameters())
    optimizer.step()
    assert_same(network, twin_of(network))


def test_with_gradients_a_step_has_them(fast):
    cache = KeyValueCache(fast.config)
    fast(TOKENS[:, :1], cache=cache).sum().backward()
    assert fast.decoder.layers[0].attention.query.weight.grad is not None


@pytest.mark.parametrize("whole", [True, False])
def test_dropout_is_not_left_out(fast, whole):
    """Also where it alone is in training, as those do who ask how sure a model is."""
    dropout = fast.decoder.layers[0].attention_residual.dropout
    (fast if whole else dropout).train()
    dropout.p = 0.5
    with torch.no_grad():
        first, second = (fast(TOKENS[:, :1], cache=KeyValueCache(fast.config)) for _ in range(2))
    assert not torch.equal(first, second)


def test_a_copy_goes_its_own_way(fast):
    copy = deepcopy(fast)
    with torch.no_grad():
        copy.decoder.layers[0].feed_forward.up.weight.zero_()
    assert_same(fast, twin_of(fast))
    assert_same(copy, twin_of(copy))


def test_other_precisions_leave_the_kernels(fast):
    fast.double()
    found, cache = logits_of(fast, TOKENS[:, :8])
    assert cache.stores[0].key.dtype == torch.float64
    assert fast.decoder.plan is None
    torch.testing.assert_close(found.double(), logits_of(twin_of(fast).double(), TOKENS[:, :8])[0].double())


def test_a_module_in_anothers_place_is_run(fast):
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


def test_packing_an_accelerated_network_counts(fast):
    expected, _ = logits_of(pack_network(twin_of(fast), "int4"), TOKENS[:, :8])
    found, _ = logits_of(pack_network(fast, "int4"), TOKENS[:, :8])
    assert (found - expected).norm() / expected.norm() < 0.05
    with pytest.raises(ClearheadError, match="already packed"):
        pack_network(fast, "int8")


def test_hooks_are_heard(fast):
    residuals = []
    handle = fast.decoder.layers[0].feed_forward.register_forward_hook(lambda *given: residuals.append(1))
    logits_of(fast, TOKENS[:, :8])
    assert len(residuals) == 4  # the prompt and three steps
    handle.remove()
    logits_of(fast, TOKENS[:, :8])
    assert fast.decoder.plan is not None


def test_a_generation_is_traced_as_a_whole(fast):
    trace = trace_generation(clearhead.Model(fast).text_generator, [1, 2, 3], max_new_tokens=5, temperature=0)
    assert len(trace.tokens) == 7


def test_compiled_a_step_is_the_network(fast):
    network = torch.compile(fast, backend="eager")
    with torch.no_grad():
        found = network(TOKENS[:, :1], cache=KeyValueCache(fast.config))
    torch.testing.assert_close(found, logits_of(twin_of(fast), TOKENS[:, :1], prompt=1)[0], atol=1e-4, rtol=1e-4)


# --- caches and memories that do not fit


def step(network, tokens, cache, **options):
    with torch.no_grad():
        return network.hidden_states(tokens, cache=cache, **options)


def test_a_cache_of_another_batch_is_refused(fast):
    cache = KeyValueCache(fast.config)
    step(fast, TOKENS[:1, :1], cache)
    cache.truncate(0)
    with pytest.raises(ClearheadError, match="the cache holds 1 sequences, but the input has 3"):
        step(fast, torch.zeros(3, 1, dtype=torch.long), cache)


def test_a_cache_in_the_place_of_a_longer_one(fast):
    """Memory that was given back: it begins at the same address, and the heads stand closer together."""
    longer, shorter = KeyValueCache(fast.config), KeyValueCache(fast.config)
    step(fast, torch.zeros(2, 70, dtype=torch.long), longer)
    expected = step(fast, TOKENS[:, :5], longer)
    for old, new in zip(longer.stores, shorter.stores, strict=True):
        batch, heads, _, width = old.key.shape
        shape = (batch, heads, new.capacity, width)
        new.key, new.value = (part.flatten()[: math.prod(shape)].view(shape) for part in (old.key, old.value))
    torch.testing.assert_close(step(fast, TOKENS[:, :5], shorter), expected)
    shorter.advance()
    found = step(fast, TOKENS[:, 5:6], shorter)
    torch.testing.assert_close(found, step(twin_of(fast), TOKENS[:, :6], None)[:, -1:], atol=1e-4, rtol=1e-4)


def test_buffers_that_are_exchanged_and_have_less_room_than_the_others(fast):
    cache = KeyValueCache(fast.config)
    step(fast, TOKENS[:, :5], cache)
    cache.advance()
    store = cache.stores[1]
    old, store.capacity = (store.key, store.value), 6
    store.key, store.value = (part[:, :, :6].clone() for part in old)
    for place in range(5, 9):
        found = step(fast, TOKENS[:, place : place + 1], cache)
        cache.advance()
    assert store.key.shape[2] == 12
    assert not any(part[:, :, 5:].any() for part in old)  # nothing was written where it no longer is
    torch.testing.assert_close(found, step(twin_of(fast), TOKENS[:, :9], None)[:, -1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_new", [1, 2])
def test_a_key_that_is_no_number_is_not_overlooked(fast, num_new):
    cache = KeyValueCache(fast.config)
    step(fast, TOKENS[:, :4], cache)
    cache.advance()
    cache.stores[0].key[:, :, 1] = torch.nan
    assert step(fast, TOKENS[:, 4 : 4 + num_new], cache).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cache_of_another_precision_is_refused(fast, dtype):
    cache = KeyValueCache(fast.config)
    step(fast, TOKENS[:, :1], cache)
    cache.advance()
    for store in cache.stores:
        store.key, store.value = store.key.to(dtype), store.value.to(dtype)
    with pytest.raises(ClearheadError, match="start with a new cache"):
        step(fast, TOKENS[:, 1:2], cache)
    fresh = KeyValueCache(fast.config)
    step(fast, TOKENS[:, :1], fresh)
    assert fresh.stores[0].key is not None  # written there, not where the refused cache was


def test_a_decoder_without_its_memory_is_refused():
    network = network_of("bart-base")
    accelerate(network)
    with pytest.raises(ClearheadError, match="it needs encoder_output"):
        step(network, TOKENS[:, :1], KeyValueCache(network.config))


def test_a_memory_nobody_asked_for_is_refused(fast):
    bart = network_of("bart-base")
    with torch.no_grad():
        encoder_output = bart.precompute_cross_attention(bart.encode(TOKENS[:, :4]))
    with pytest.raises(ClearheadError, match="leave out encoder_output"):
        step(fast, TOKENS[:, :1], KeyValueCache(fast.config), encoder_output=encoder_output)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((TOKENS[0, :1],), "must be \\(batch, length\\)"),
        ((TOKENS[:, :1], torch.ones(2, 9)), "mask has shape"),
        ((TOKENS[:, :1].float(),), "tokens must be int64 or int32"),
        ((TOKENS[:, :1] + VOCAB,), "out of range"),
    ],
)
def test_bad_inputs_are_refused_as_by_the_network(fast, given, sentence):
    with torch.no_grad(), pytest.raises(ClearheadError, match=sentence):
        fast.hidden_states(*given, cache=KeyValueCache(fast.config))


def test_two_threads_at_once(fast):
    rows = [torch.randint(0, VOCAB, (1, 60)) for _ in range(2)]
    expected, found = [logits_of(fast, row)[0] for row in rows], {}

    def work(number):
        found[number] = [logits_of(fast, rows[number])[0] for _ in range(3)]

    threads = [Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        for logits in found[number]:
            torch.testing.assert_close(logits, expected[number], atol=1e-5, rtol=1e-5)

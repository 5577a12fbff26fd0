"""A decoder's layers as the kernels of step.cpp see them, and the call that runs new tokens through them.

    plan = Plan(stack); plan.run(x, positions, memory, cache)

Built once: matrices that are read together are merged, and the modules' own become views of them. For every call only
the numbers that change are set: slots, angles, and the cache's addresses when its buffers have moved. Norms and biases
are copies, and modules may be exchanged: `watch` tells whether the plan still says what the modules say.
"""

import operator
from ctypes import byref
from typing import Any, cast
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.architecture import Causal, FeedForward, GroupedAttention, Rope
from clearhead.backends.cpu import library as cpu
from clearhead.backends.cpu.change_detector import Watch, droppers_in, planned
from clearhead.backends.lowering import ACTIVATIONS, PLACEMENTS, are_plain, merge
from clearhead.backends.packed.modules import PackedLinear
from clearhead.cache import ContiguousStore, KeyValueCache, Place
from clearhead.errors import ClearheadError
from clearhead.model import (
    Attention,
    Block,
    EncoderOutput,
    FeedForwardLayer,
    LayerStack,
    Residual,
    RootMeanSquare,
    Rotation,
    cross_attention_mask,
    make_mask,
    rotation_for,
)


class Plan:
    @staticmethod
    def suits(stack: LayerStack) -> bool:
        """Plain modules that nothing hooks into and that drop nothing, in a precision the kernels have."""
        modules, tensors = planned(stack), (*stack.layers.parameters(), *stack.final_norm.parameters())
        kinds = {(tensor.dtype, tensor.device.type) for tensor in tensors}
        precise = kinds in ({(torch.float32, "cpu")}, {(torch.bfloat16, "cpu")})
        return precise and are_plain(modules) and not any(module.training for module in droppers_in(modules))

    def __init__(self, stack: LayerStack):
        self.held: list[Any] = []  # whatever the structures point to
        self.blocks = [cast(Block, block) for block in stack.layers]
        self.dtype = next(stack.layers.parameters()).dtype
        # Configs compare by value, thirty times a token; their numbers do not.
        attentions = [cast(Attention, block.attention).config for block in self.blocks]
        self.kinds = [
            (np.array([i for i, a in enumerate(attentions) if a == kind]), kind) for kind in dict.fromkeys(attentions)
        ]
        self.tables: list[Rotation | None] = [
            self.angle_table(kind, 512) if isinstance(kind.position, Rope) else None for _, kind in self.kinds
        ]
        self.bound: list[ref[Tensor]] = []  # the buffers that `kept` points to,
        self.room = 0  # and how many tokens all of them can take where none is a ring
        self.final_norm = self.norm(stack.final_norm)
        self.layers = (cpu.Layer * len(self.blocks))(*(self.layer(block) for block in self.blocks))
        self.angles = (cpu.Angles * len(self.blocks))()
        self.kept = (cpu.KeyValueView * len(self.blocks))()
        self.across = (cpu.KeyValueView * len(self.blocks))()
        self.numbers, self.turns = np.ctypeslib.as_array(self.kept), np.ctypeslib.as_array(self.angles)
        self.watch = Watch(stack)
        self.mark = object()  # of this plan, on the caches that it wrote

    # --- building

    def layer(self, block: Block) -> cpu.Layer:
        attention, feed_forward = block.attention, block.feed_forward
        assert isinstance(attention, Attention)
        assert isinstance(feed_forward, FeedForwardLayer)
        config = block.layer.feed_forward
        assert isinstance(config, FeedForward)
        layer = cpu.Layer(PLACEMENTS[block.layer.placement], ACTIVATIONS[config.activation], config.gated)
        layer.heads = self.heads(attention)
        layer.projected = self.merged(attention.query, attention.key, attention.value)
        layer.output = self.merged(attention.output)
        inner = (feed_forward.up,) if feed_forward.gate is None else (feed_forward.gate, feed_forward.up)
        layer.inner, layer.down = self.merged(*inner), self.merged(feed_forward.down)
        residuals: dict[int, Residual] = {0: block.attention_residual, 2: block.feed_forward_residual}
        if block.layer.cross_attention is not None:
            layer.has_cross_attention = 1
            across = cast(Attention, block.cross_attention)
            layer.cross_heads = self.heads(across)
            layer.cross_query, layer.cross_output = self.merged(across.query), self.merged(across.output)
            residuals[1] = block.cross_attention_residual
        for place, residual in residuals.items():
            layer.norms[place] = self.norm(residual.norm)
            layer.branch_norms[place] = self.norm(residual.branch_norm)
        return layer

    def heads(self, attention: Attention) -> cpu.Heads:
        config = attention.config
        rope = config.position if isinstance(config.position, Rope) else None
        pairs = 0 if rope is None else (rope.width or config.head_width) // 2
        neighbours = rope is not None and rope.pairing == "interleaved"
        norms = self.norm(attention.query_norm), self.norm(attention.key_norm)
        sizes = config.num_heads, config.num_kv_heads, config.head_width
        return cpu.Heads(*sizes, pairs, neighbours, attention.scale, *norms)

    def norm(self, module: nn.Module) -> cpu.Norm:
        if isinstance(module, nn.Identity):
            return cpu.Norm()
        weight = cast(Tensor, module.weight).detach().float()
        if isinstance(module, RootMeanSquare):
            epsilon = module.config.epsilon
            return cpu.Norm(1, epsilon, self.hold(1 + weight if module.config.unit_offset else weight), None)
        assert isinstance(module, nn.LayerNorm)
        bias = None if module.bias is None else self.hold(module.bias.detach().float())
        return cpu.Norm(2, module.eps, self.hold(weight), bias)

    def hold(self, tensor: Tensor) -> int:
        self.held.append(tensor.contiguous())
        return self.held[-1].data_ptr()

    def merged(self, *modules: nn.Linear | PackedLinear) -> cpu.Matrix:
        bias = None
        if modules[0].bias is not None:
            bias = torch.cat([cast(Tensor, module.bias).detach().float() for module in modules])
        weight = merge(modules)
        self.held += [bias, weight]
        return cpu.matrix_of(weight, bias)

    # --- running

    def run(self, x: Tensor, positions: Tensor, encoder_output: EncoderOutput | None, cache: KeyValueCache) -> None:
        """x (B, T, D), changed in place; positions (B or 1, T). With T > 1 every store is contiguous."""
        batch, num_new = x.shape[:2]
        places = self.bind(cache, batch, num_new)
        alive = []
        for number, (layers, _) in enumerate(self.kinds):
            slot, num_slots = places[int(layers[0])]
            alive += self.see(number, positions, cache, slot, num_slots, batch, num_new)
        across = None
        if encoder_output is not None and encoder_output.cross_keys_values is not None:
            alive += self.look_across(encoder_output, batch)
            across = self.across
        kernels = cpu.kernel_library()
        assert kernels is not None
        kernels.clearhead_step(
            self.layers,
            len(self.blocks),
            self.kept,
            across,
            self.angles,
            byref(self.final_norm),
            x.data_ptr(),
            batch,
            num_new,
        )
        del alive  # the structures pointed to it until here

    def bind(self, cache: KeyValueCache, batch: int, num_new: int) -> list[tuple[int, int]]:
        """Point to the buffers of this cache, with room for the new tokens: each layer's slot and slots in use."""
        held = buffers_of(cache)
        same = len(held) == len(self.bound) and all(map(operator.is_, map(operator.call, self.bound), held))
        if same and cache.length + num_new <= self.room:
            return [(cache.length, cache.length + num_new)] * len(self.blocks)
        self.bound, self.room, places = [], 0, []  # whatever goes wrong from here on, nothing is bound
        for block, kept, store in zip(self.blocks, self.kept, cache.stores, strict=True):
            heads = cast(GroupedAttention, block.layer.attention)
            if num_new == 1:
                shape = (batch, heads.num_kv_heads, heads.head_width)
                place = store.reserve(cache.length, shape, self.dtype, torch.device("cpu"))
            else:
                blank = torch.zeros((), dtype=self.dtype).expand(batch, heads.num_kv_heads, num_new, heads.head_width)
                place = Place(*store.write(cache.length, blank, blank), cache.length, cache.length + num_new)
            self.check(place.key, place.value, heads, batch)
            put(kept, place.key, place.value)
            places.append((place.slot, place.num_slots))
        self.bound = [ref(buffer) for buffer in buffers_of(cache)]
        contiguous = all(isinstance(store, ContiguousStore) for store in cache.stores)
        self.room = min(buffer.shape[2] for buffer in buffers_of(cache)) if contiguous else 0
        return places

    def check(self, key: Tensor, value: Tensor, heads: GroupedAttention, batch: int) -> None:
        """The kernels go by the sizes they are told: what is kept for another batch or model is beyond its end."""
        expected = (batch, heads.num_kv_heads, heads.head_width, self.dtype, "cpu")
        for part in (key, value):
            found = (*part.shape[:2], part.shape[3], part.dtype, part.device.type)
            if found != expected:
                raise ClearheadError(
                    f"keys and values are kept for (rows, heads, width, dtype, device) {found}, and this step needs "
                    f"{expected}; start with a new cache"
                )

    def see(
        self, number: int, positions: Tensor, cache: KeyValueCache, slot: int, num_slots: int, batch: int, num_new: int
    ) -> list[Tensor]:
        """Tell the layers of one kind their slot, mask and angles; what these point to."""
        layers, attention = self.kinds[number]
        self.numbers["slot"][layers], self.numbers["num_slots"][layers] = slot, num_slots
        alive = self.rotate(number, positions, cache) if self.tables[number] is not None else []
        if cache.real is None and isinstance(attention.pattern, Causal):  # no padding and no window: all may be seen
            self.numbers["allowed"][layers] = 0
            return alive
        allowed = make_mask(attention.pattern, cache.grid(attention.pattern)).allowed
        assert allowed is not None
        seen = allowed.expand(batch, 1, num_new, num_slots).contiguous()
        self.numbers["allowed"][layers] = seen.data_ptr()
        return [*alive, seen]

    def rotate(self, number: int, positions: Tensor, cache: KeyValueCache) -> list[Tensor]:
        """Cosines and sines of these positions, from a table that doubles when it is too short."""
        layers, attention = self.kinds[number]
        furthest = cache.length + positions.shape[1] - 1  # rows that are padded stand behind
        table = self.tables[number]
        assert table is not None
        if furthest >= table.cosine.shape[2]:
            table = self.tables[number] = self.angle_table(attention, 2 * furthest)
        if cache.real is None:  # one row of angles for each position, the same for the whole batch: no tensor is made
            begin = cache.length * table.cosine.shape[-1] * table.cosine.element_size()
            self.turns["cosine"][layers] = table.cosine.data_ptr() + begin
            self.turns["sine"][layers] = table.sine.data_ptr() + begin
            self.turns["row_stride"][layers] = 0
            return []
        cosine, sine = table.cosine[0, 0, positions], table.sine[0, 0, positions]
        self.turns["cosine"][layers], self.turns["sine"][layers] = cosine.data_ptr(), sine.data_ptr()
        self.turns["row_stride"][layers] = cosine.stride(0) if len(positions) > 1 else 0
        return [cosine, sine]

    @staticmethod
    def angle_table(attention: GroupedAttention, length: int) -> Rotation:
        assert isinstance(attention.position, Rope)
        return rotation_for(attention.position, torch.arange(length)[None], attention.head_width, torch.float32)

    def look_across(self, encoder_output: EncoderOutput, batch: int) -> list[Tensor]:
        assert encoder_output.cross_keys_values is not None
        allowed, num_slots = (
            cross_attention_mask(encoder_output.mask).allowed,
            encoder_output.cross_keys_values[0][0].shape[2],
        )
        seen = None if allowed is None else allowed.expand(batch, 1, 1, num_slots).contiguous()
        alive = [] if seen is None else [seen]
        for block, kept, (key, value) in zip(self.blocks, self.across, encoder_output.cross_keys_values, strict=True):
            self.check(key, value, cast(GroupedAttention, block.layer.cross_attention), batch)
            if key.stride() != value.stride() or key.stride(3) != 1:
                key, value = key.contiguous(), value.contiguous()
                alive += [key, value]
            put(kept, key, value)
            kept.num_slots, kept.allowed = num_slots, 0 if seen is None else seen.data_ptr()
        return alive


def buffers_of(cache: KeyValueCache) -> list[Tensor]:
    return [buffer for store in cache.stores for buffer in (store.key, store.value) if buffer is not None]


def put(kept: cpu.KeyValueView, key: Tensor, value: Tensor) -> None:
    kept.keys, kept.values = key.data_ptr(), value.data_ptr()
    kept.row_stride, kept.head_stride, kept.slot_stride = key.stride()[:3]
    kept.is_bfloat16 = key.dtype == torch.bfloat16

"""The two kinds of accelerated layer: `tied` base layers and the paper's `lean` ones.

Shapes: B rows, n positions, L attended slots, D hidden size, m lean heads, d head dimension.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from multirate.models.arena import KVArena
from multirate.models.base import BaseModel, Block
from multirate.models.packed import pack_linears
from multirate.models.packing import adapted_packer
from multirate.models.quantized import QuantizedLinear
from multirate.models.siblings import sibling_linears
from multirate.streams.adapters import AdaptedLinear, LowRank, LowRankMix, rms_norm


@dataclass(frozen=True)
class Prefix:
    """The verified part of the arena, which lean layers attend to.

    Attributes:
        visible: arena slots `[0, visible)` are read.
        masks: per attention type, `[B, n, visible]` bool, True = seen.
    """

    visible: int
    masks: dict[str, Tensor]


def _share(layer: nn.Module) -> nn.Module:
    """A copy of a module tree that uses the same tensors and the same model config."""
    configs = [c for m in layer.modules() if (c := getattr(m, "config", None)) is not None]
    shared = chain(layer.parameters(), layer.buffers(), configs)
    return copy.deepcopy(layer, {id(x): x for x in shared})


class TiedLayer(nn.Module):
    """A base decoder layer run a second time, with low-rank adapters on all its linear modules.

    The layer's modules are copied, its weights are not: the copy reads the base's tensors, and the
    base itself never sees the adapters.
    """

    def __init__(self, base: BaseModel, index: int, rank: int) -> None:
        super().__init__()
        self.base, self.index = base, index
        self.adapters = nn.ModuleDict()
        tied = _share(base.layers[index])
        linears = [(n, m) for n, m in tied.named_modules() if isinstance(m, nn.Linear)]
        for name, linear in linears:
            adapter = LowRank(linear.in_features, linear.out_features, rank)
            self.adapters[name.replace(".", "-")] = adapter
            tied.set_submodule(name, AdaptedLinear(linear, adapter))
        # Kept out of the module tree: the base's weights are not this accelerator's to save or move.
        self.__dict__["tied"] = tied

        self.__dict__["folded"] = None

    tied: nn.Module
    folded: nn.Module | None

    def forward(self, p: Tensor, block: Block, arena: KVArena, prefix: Prefix | None) -> Tensor:
        """p_i `[B, n, D]` to p_{i+1}; writes provisional keys and values at the block's slots."""
        arena.use(block, self.index, self.index + 1)
        return self.base.run_layer(self.folded or self.tied, self.index, p, block, arena)

    def fold(self) -> None:
        """Draft faster: add the adapters into copies of the weights. `train()` undoes it.

        A draft step is a handful of small matmuls, so the adapters' own cost shows: unfolded, the
        embedded model's two layers take 1.4 times as long.
        """
        folded = _share(self.tied)
        for name, module in list(folded.named_modules()):
            if isinstance(module, AdaptedLinear):
                folded.set_submodule(name, module.folded())
        self.__dict__["folded"] = folded

    def pack(self, pack: Callable[[nn.Linear], nn.Module]) -> None:
        """Pack copies of the weights (`models.packed`), before the base itself is packed.

        Adapters are folded in, or stay beside weights that 4 bits hold.
        """
        linears = [m.linear for m in self.tied.modules() if isinstance(m, AdaptedLinear)]
        pack_beside = adapted_packer(linears)
        if pack_beside is None:
            self.fold()
            assert self.folded is not None
            pack_linears(self.folded, pack)
        else:
            self.__dict__["folded"] = self._pack_beside(pack_beside)
        self.__dict__["tied"] = self.folded  # lets go of the base's own, unpacked weights

    def _pack_beside(self, pack: Callable[[nn.Linear], QuantizedLinear]) -> nn.Module:
        """A copy of the layer whose packed weights have the adapters beside them."""
        layer, adapters = _share(self.tied), {}
        for name, module in list(layer.named_modules()):
            if isinstance(module, AdaptedLinear):
                layer.set_submodule(name, module.linear)
                adapters[name] = module.adapter.A, module.adapter.B
        joint = {names[0]: names for names, _ in sibling_linears(layer)}
        for name, packed in pack_linears(layer, pack).items():
            cast(QuantizedLinear, packed).adapt([adapters[n] for n in joint.get(name, [name])])
        return layer

    def fold_bytes(self) -> int:
        """Memory that `fold` takes."""
        modules = [m for m in self.tied.modules() if isinstance(m, AdaptedLinear)]
        return sum(m.linear.weight.nbytes for m in modules)

    def train(self, mode: bool = True) -> TiedLayer:
        if mode:
            self.__dict__["folded"] = None
        return super().train(mode)


class LeanLayer(nn.Module):
    """The paper's accelerated layer: own small modules, keys and values read from a slow layer.

    Low-rank queries for a few heads, attention over the verified tokens' keys and values of the slow
    layer (all of them, or the best-scoring `attended_tokens`), low-rank output, low-rank MLP. It runs
    no base weights and writes no keys or values.
    """

    def __init__(
        self,
        base: BaseModel,
        source: int,
        *,
        rank: int,
        num_heads: int,
        attended_tokens: int | None,
    ) -> None:
        super().__init__()
        self.source, self.attended_tokens = source, attended_tokens
        self.kind = base.layer_types[source]
        attention = cast(Any, base.layers[source]).self_attn
        self.num_heads, self.head_dim = num_heads, int(attention.head_dim)
        self.scaling = float(attention.scaling)
        kv_heads = int(base.config.num_key_value_heads)
        self.kv_heads = [head * kv_heads // num_heads for head in range(num_heads)]
        # Keys in the arena are already rotated; the model's own function rotates the queries alike.
        self.apply_rotary = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        size, inner = base.hidden_size, num_heads * self.head_dim
        self.query = LowRank(size, inner, rank)
        self.output = LowRank(inner, size, rank)
        self.mix = LowRankMix(size, rank)
        nn.init.normal_(self.query.B, std=rank**-0.5)  # attention itself must not start as uniform

    def forward(self, p: Tensor, block: Block, arena: KVArena, prefix: Prefix | None) -> Tensor:
        """p_i `[B, n, D]` to p_{i+1}, attending to the prefix only."""
        assert prefix is not None
        rows, n, _ = p.shape
        normed = rms_norm(p)
        q = self.query(normed).view(rows, n, self.num_heads, self.head_dim).transpose(1, 2)
        cos, sin = block.rotary[self.kind]
        q = self.apply_rotary(q, q, cos.to(q.dtype), sin.to(q.dtype))[0]  # [B, m, n, d]
        layer = arena.layers[self.source]
        keys = cast(Tensor, layer.keys)[:, self.kv_heads, : prefix.visible]  # [B, m, L, d]
        values = cast(Tensor, layer.values)[:, self.kv_heads, : prefix.visible]
        scores = q @ keys.transpose(2, 3) * self.scaling
        # The lowest finite number, not -inf: a row that sees nothing yet must not become NaN.
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~prefix.masks[self.kind][:, None], lowest)
        if self.attended_tokens is not None and self.attended_tokens < scores.shape[-1]:
            floor = scores.topk(self.attended_tokens, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < floor, lowest)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
        seen = (weights @ values).transpose(1, 2).reshape(rows, n, -1)
        return p + cast(Tensor, self.output(seen)) + cast(Tensor, self.mix(p, normed))

"""The KV arena: one preallocated key and value tensor per layer, shared by all streams.

The arena knows nothing about tokens or acceptance. A forward pass names the slots its rows write to
and how many leading slots are attended (a `Block`, see `multirate.models.block`); what a row may see
is the mask's business. Rolling back is therefore free: a rejected draft is simply not counted, and
the next write overwrites it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from multirate.models.block import Block
    from multirate.models.cuda_graphs import ArenaPool


def write_slots(target: Tensor, slots: Tensor, states: Tensor) -> None:
    """Write `[rows, kv_heads, n, head_dim]` to slots `[rows, n]` of `[rows, kv_heads, L, head_dim]`."""
    # Not `len(target)`, which would fix a graph to one number of rows.
    rows = torch.arange(target.shape[0], device=target.device)[:, None]
    target[rows, :, slots] = states.transpose(1, 2)


class ArenaLayer(CacheLayerMixin):
    """Keys and values of one layer, each `[rows, kv_heads, max_len, head_dim]`."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self.block: Block | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write `[rows, kv_heads, n, head_dim]` at the block's slots; return the attended prefix."""
        block, keys, values = self.block, self.keys, self.values
        assert block is not None and keys is not None and values is not None
        if block.start is not None:  # all rows write the same run of slots: one strided copy
            stop = block.start + key_states.shape[2]
            keys[:, :, block.start : stop] = key_states
            values[:, :, block.start : stop] = value_states
        else:
            write_slots(keys, block.slots, key_states)
            write_slots(values, block.slots, value_states)
        return keys[:, :, : block.visible], values[:, :, : block.visible]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the arena is allocated when it is made."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        # Lengths belong to the generation loop, row by row; a single number would be wrong.
        raise NotImplementedError("KV arena rows have lengths of their own; ask the decoding loop")

    def get_max_length(self) -> int:
        assert self.keys is not None
        return int(self.keys.shape[2])


class KVArena(Cache):
    """Preallocated keys and values for all layers of a model.

    Args:
        config: the base model's config.
        rows: batch rows.
        max_len: slots in each row (tokens, drafts included).
        dtype: storage type of keys and values.
        device: where they live.
        only: layers that have slots at all; None for all of them.
        pool: lends the memory; there may then be more slots.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        rows: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str,
        only: Collection[int] | None = None,
        pool: ArenaPool | None = None,
    ) -> None:
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        # One tensor, [layers, keys and values, rows, kv_heads, max_len, head_dim]: what is done to all
        # layers alike is one operation. Zeros, not empty: a masked slot still enters the product with
        # weight 0, and 0 * NaN is NaN.
        every = range(config.num_hidden_layers)
        self._held = sorted(every if only is None else only)
        shape = (2, rows, config.num_key_value_heads, max_len, head_dim)
        whole = (len(self._held), *shape)
        if pool is None:
            self._all = torch.zeros(whole, dtype=dtype, device=device)
        else:
            self._all = pool.borrow(whole, slots=4, dtype=dtype, device=torch.device(device))
            pool.give_back_with(self, self._all)
        none = self._all.new_zeros((rows, config.num_key_value_heads, 0, head_dim))
        held = {layer: (self._part(i, 0), self._part(i, 1)) for i, layer in enumerate(self._held)}
        super().__init__(layers=[ArenaLayer(*held.get(i, (none, none))) for i in every])

    def _part(self, layer: int, which: int) -> Tensor:
        """Keys (0) or values (1) of a layer: the same memory, but no view for autograd.

        Training writes one layer's keys while another's are saved for the backward pass.
        """
        part = self._all[layer, which]
        return part.new_empty(0).set_(
            self._all.untyped_storage(), part.storage_offset(), part.shape, part.stride()
        )

    @property
    def rows(self) -> int:
        return int(self._all.shape[2])

    @property
    def max_len(self) -> int:
        return int(self._all.shape[4])

    @property
    def nbytes(self) -> int:
        """Bytes held by all keys and values."""
        return self._all.nbytes

    def memory(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each `[rows, kv_heads, max_len, head_dim]`."""
        layer = self.layers[index]
        return cast(Tensor, layer.keys), cast(Tensor, layer.values)

    def use(self, block: Block, start: int, stop: int) -> None:
        """Point layers `start..stop-1` at the block that is about to run through them."""
        for layer in self.layers[start:stop]:
            layer.block = block

    def move(self, rows: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots, in all layers, to other slots of the same row: row i from source i to target i.

        All are read before any is written, so sources and targets may overlap.
        """
        device = self._all.device
        row, source, target = (torch.tensor(x, device=device) for x in (rows, sources, targets))
        self._all[:, :, row, :, target] = self._all[:, :, row, :, source]

    def keep(self, rows: Tensor) -> None:
        """Keep only the given rows (`[kept]` indices, in this order). Memory is freed with the arena."""
        kept = len(rows)
        for i, (keys, values) in zip(self._held, self._all, strict=True):
            keys[:kept], values[:kept] = keys[rows], values[rows]  # one layer's copy at a time
            self.layers[i].keys, self.layers[i].values = keys[:kept], values[:kept]
        self._all = self._all[:, :, :kept]

"""The frozen base model as one layer loop over a KV arena.

`BaseModel` is the only place that runs transformers' decoder layers (compiled ones through `compiled`).
Plain decoding, prefill, verification of drafts, early exit and the accelerated stream's own slow layers
are all `run_layers(h, start, stop, block, arena)`; nothing else runs a layer. The module knows nothing
about tokens that are accepted or sampled.

Shapes: B rows, n block positions, L attended slots, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from multirate.config.errors import MultirateError
from multirate.models.ahead import POSITIONS, ROWS, SLOTS, VISIBLE
from multirate.models.architectures import FULL, SLIDING, architecture_of, layer_types
from multirate.models.arena import KVArena
from multirate.models.attention import GROUPED
from multirate.models.compiled import CompiledStack, compile_mode
from multirate.models.packed import PACKED, PackedLinear, can_pack, pack_linears
from multirate.models.packing import layer_packer
from multirate.models.quantized import (
    GROUP,
    is_exact,
    quantize_with_torchao,
    require_quantizable,
)

ATTENTION_IMPLEMENTATIONS = ("sdpa", GROUPED, "eager")


@dataclass(frozen=True)
class Block:
    """Where one forward pass's positions sit and what they may see. Made by `BaseModel.block`.

    Attributes:
        positions: `[B, n]` rotary positions.
        slots: `[B, n]` arena slots that are written.
        start: first slot when all rows write the same contiguous run, else None.
        visible: arena slots `[0, visible)` enter attention.
        masks: per attention type, `[B, 1, n, visible]`; bool (True = seen) or additive.
        rotary: per attention type, the (cos, sin) pair.
    """

    positions: Tensor
    slots: Tensor
    start: int | None
    visible: int
    masks: dict[str, Tensor]
    rotary: dict[str, tuple[Tensor, Tensor]]

    def tail(self, n: int) -> Block:
        """The last n positions alone; what the others wrote they see as before."""

        def last(x: Tensor) -> Tensor:
            return x[:, -n:].contiguous()  # once, not in every compiled layer

        return Block(
            positions=last(self.positions),
            slots=last(self.slots),
            start=None if self.start is None else self.start + self.slots.shape[1] - n,
            visible=self.visible,
            masks={kind: mask[:, :, -n:].contiguous() for kind, mask in self.masks.items()},
            rotary={kind: (last(cos), last(sin)) for kind, (cos, sin) in self.rotary.items()},
        )


class BaseModel:
    """A loaded causal LM, seen as embed -> run_layers -> head.

    Args:
        model: a supported transformers causal LM. It is not copied and not changed, apart from
            being put in eval mode.

    Raises:
        MultirateError: unsupported architecture or attention implementation.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        self.config = model.config
        self.architecture = architecture_of(self.config)
        self.layer_types = layer_types(self.config)
        attention = self.config._attn_implementation
        if attention not in ATTENTION_IMPLEMENTATIONS:
            raise MultirateError(
                f"Attention implementation {attention!r} cannot read the KV arena's masks. Load the "
                f"model with attn_implementation set to one of {', '.join(ATTENTION_IMPLEMENTATIONS)}."
            )
        self._additive_masks = attention == "eager"
        body = cast(nn.Module, model.get_decoder())
        self.embed_tokens = cast(nn.Embedding, body.embed_tokens)
        self.layers = cast(nn.ModuleList, body.layers)
        self.final_norm = cast(nn.Module, body.norm)
        self.rotary_emb = cast(nn.Module, body.rotary_emb)
        self.lm_head = cast(nn.Linear | PackedLinear, model.get_output_embeddings())
        self._packing: str | None = None
        self._compiled: CompiledStack | None = None
        self._warm: set[bool] = set()  # of batches of one row, and of several

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.lm_head.out_features)

    @property
    def context_length(self) -> int:
        """Positions that a text may have, `config.max_position_embeddings` for most models.

        A `longrope` model (Phi-3 128k) changes the rotary frequencies of all positions once a text
        grows past its original length. Keys that are already stored would then be wrong, and a
        verified block would differ from plain steps, so its context ends at that length.
        """
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            return int(
                rope.get("original_max_position_embeddings")
                or self.config.original_max_position_embeddings
            )
        return int(self.config.max_position_embeddings)

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, keys and values; of the weights too unless they are packed."""
        on_cpu = self.device.type == "cpu"
        return torch.float32 if self.packed and on_cpu else self.embed_tokens.weight.dtype

    @property
    def packed(self) -> bool:
        """Whether `pack` was called: the weights are in a form for decoding only."""
        return self._packing is not None

    @property
    def dtype_name(self) -> str:
        """What users call the weights' type: "bfloat16", ..., "packed", "int8" or "int4"."""
        return self._packing or str(self.dtype).removeprefix("torch.")

    def require_packable(self, kind: str = PACKED) -> None:
        """Check that `pack` is possible.

        Args:
            kind: "packed", or "int8" or "int4" (`models.quantized`).

        Raises:
            MultirateError: a device or an architecture that weights cannot be packed for.
        """
        if kind != PACKED:
            require_quantizable(kind, self.device, experts=self.architecture.experts)
        elif not can_pack(self.device) or self.architecture.experts:
            what = "a mixture of experts" if self.architecture.experts else f"on {self.device}"
            raise MultirateError(
                f"dtype {PACKED!r} is for models without experts on an x86 CPU with AVX2; this one is "
                f"{what}. Use bfloat16 or float32."
            )

    def pack(self, kind: str = PACKED) -> None:
        """Pack all linear layers; for decoding only, and not to be undone.

        Args:
            kind: "packed" (`models.packed`), or "int8" or "int4" (`models.quantized`).

        Raises:
            MultirateError: a device or an architecture that weights cannot be packed for.
        """
        self.require_packable(kind)
        self._packing = kind
        if self.device.type != "cpu":
            quantize_with_torchao(self.model, self.lm_head, kind)
            return
        pack_linears(self.model, layer_packer(kind, self.lm_head))
        # The rest (norms, biases) is small; embeddings stay half as large and are cast when looked up.
        for module in self.model.modules():
            if not isinstance(module, nn.Embedding):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.float()
        self.lm_head = cast(PackedLinear, self.model.get_output_embeddings())

    def is_exact(self, bits: int) -> bool:
        """Whether the layers' weights are numbers of so many bits; each matrix' first outputs tell."""
        linears = [m for m in self.layers.modules() if isinstance(m, nn.Linear)]
        return all(is_exact(linear.weight[:GROUP], bits) for linear in linears)

    def arena(self, *, rows: int, max_len: int, only: Collection[int] | None = None) -> KVArena:
        """A new, empty KV arena of this model's shape, type and device; see `KVArena`."""
        # Graphs are made for arenas with room left: that all slots are seen would be a case of its own.
        spare = 0 if self._compiled is None else 1
        return KVArena(
            self.config,
            rows=rows,
            max_len=max_len + spare,
            dtype=self.dtype,
            device=self.device,
            only=only,
        )

    def block(
        self,
        starts: Sequence[int],
        n: int,
        *,
        depths: Tensor | None = None,
        block_mask: Tensor | None = None,
    ) -> Block:
        """Place n new positions behind each row's first `starts[row]` slots.

        Without `depths` and `block_mask` the block is a causal chain. A draft tree gives both.

        Args:
            starts: valid slots of each row (its verified length), B numbers on the host.
            n: positions in the block.
            depths: `[n]` or `[B, n]` rotary position of each block entry relative to its row's start.
            block_mask: `[n, n]` or `[B, n, n]` bool, which block entries an entry sees (itself too).

        Returns:
            Block: positions, slots, masks and rotary embeddings, shared by all partial runs.
        """
        device = self.device
        offsets = torch.arange(n, device=device)
        start = torch.tensor(starts, device=device)[:, None]  # [B, 1]
        slots = start + offsets
        positions = slots if depths is None else start + depths
        visible = max(starts) + n
        keys = torch.arange(visible, device=device)
        if block_mask is None:
            seen = keys <= slots[..., None]  # [B, n, L]
        elif len(set(starts)) == 1:
            seen = F.pad(block_mask, (starts[0], 0), value=True).expand(len(starts), n, -1)
        else:
            seen = (keys < start[..., None]).expand(-1, n, -1).clone()
            columns = slots[:, None, :].expand(-1, n, -1)
            seen.scatter_(2, columns, block_mask.expand(len(starts), n, n))
        masks = {}
        for kind in set(self.layer_types):
            allowed = seen
            if kind == SLIDING:
                key_positions = keys.expand(len(starts), visible)
                if depths is not None:  # a tree's slots are not its positions
                    key_positions = key_positions.scatter(1, slots, positions.expand_as(slots))
                distance = positions[..., None] - key_positions[:, None, :]
                allowed = seen & (distance < self.config.sliding_window)
            masks[kind] = self.mask(allowed[:, None].contiguous())
        return Block(
            positions=positions,
            slots=slots,
            start=starts[0] if len(set(starts)) == 1 else None,
            visible=visible,
            masks=masks,
            rotary=self.rotary(positions),
        )

    def mask(self, allowed: Tensor) -> Tensor:
        """A bool mask (True = seen) in the form that the attention implementation reads."""
        if not self._additive_masks:
            return allowed
        zero = torch.zeros((), dtype=self.dtype, device=allowed.device)
        return torch.where(allowed, zero, torch.finfo(self.dtype).min)

    def rotary(self, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """(cos, sin) for positions `[B, n]`, per attention type."""
        like = torch.empty(1, dtype=self.dtype, device=self.device)
        kinds = set(self.layer_types)
        if self.architecture.rotary_per_type:
            return {kind: self.rotary_emb(like, positions, kind) for kind in kinds}
        return dict.fromkeys(kinds, self.rotary_emb(like, positions))

    def embed(self, ids: Tensor) -> Tensor:
        """`[B, n]` token ids to h_0 `[B, n, D]` (any embedding scale included)."""
        return cast(Tensor, self.embed_tokens(ids)).to(self.dtype)

    def run_layers(
        self,
        h: Tensor,
        start: int,
        stop: int,
        block: Block,
        arena: KVArena,
        *,
        states: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Run decoder layers `start .. stop-1` on a block and write its keys and values.

        Args:
            h: `[B, n, D]`, the slow state h_start.
            start: first layer.
            stop: one past the last layer.
            block: where the n positions sit.
            arena: keys and values of all layers.
            states: filled in place: for every key i in it with start <= i <= stop, the slow state
                h_i `[B, n, D]`.

        Returns:
            Tensor: h_stop, `[B, n, D]`.
        """
        if self.compile_mode == "model" and stop - start == self.num_layers:
            every = [h, *self._run_compiled(self.layers, range(start, stop), h, block, arena)]
            if states is not None:
                states.update({i: every[i] for i in states})
            return every[-1]
        arena.use(block, start, stop)
        for i in range(start, stop):
            if states is not None and i in states:
                states[i] = h
            h = self.run_layer(self.layers[i], i, h, block, arena)
        if states is not None and stop in states:
            states[stop] = h
        return h

    def run_layer(
        self, layer: nn.Module, index: int, h: Tensor, block: Block, arena: KVArena
    ) -> Tensor:
        """Run one decoder layer (the base's own, or a tied copy standing at `index`) on a block."""
        kind = self.layer_types[index]
        if self.compile_mode is not None:
            return self._run_compiled([layer], [index], h, block, arena)[0]
        return cast(
            Tensor,
            layer(
                h,
                attention_mask=block.masks[kind],
                position_ids=block.positions,
                cache=arena,
                position_embeddings=block.rotary[kind],
            ),
        )

    def _run_compiled(
        self,
        layers: Iterable[nn.Module],
        indices: Sequence[int],
        h: Tensor,
        block: Block,
        arena: KVArena,
    ) -> list[Tensor]:
        """Decoder layers standing at `indices`, as one graph: the state behind each."""
        assert self._compiled is not None
        return self._compiled(
            tuple(layers),
            [self.layer_types[i] for i in indices],
            h,
            block.slots,
            block.positions,
            block.masks,
            block.rotary,
            [arena.memory(i) for i in indices],
        )

    def compile(self, mode: str | None) -> None:
        """Run layers compiled from now on (`models.compiled`); for decoding only.

        Args:
            mode: "layers", "model" or "auto"; "none" or None to run them eagerly.

        Raises:
            MultirateError: an unknown mode.
        """
        chosen = compile_mode(mode, self.device)
        self._compiled = None if chosen is None else CompiledStack(chosen, self.device)
        self._warm.clear()

    @property
    def compile_mode(self) -> str | None:
        """How layers are compiled; None if they run eagerly."""
        return None if self._compiled is None or self._compiled.failed else self._compiled.mode

    @torch.inference_mode()
    def warm_up(self, rows: int) -> None:
        """Compile now what a batch of so many rows needs, if it is not yet."""
        if self.compile_mode is None or (rows > 1) in self._warm:
            return
        rows = ROWS if rows > 1 else 1
        for n in (POSITIONS, 1):
            block = self.block([VISIBLE - n] * rows, n)
            h = self.embed(torch.zeros(rows, n, dtype=torch.long, device=self.device))
            arena = self.arena(rows=rows, max_len=SLOTS)
            self.run_layers(h, 0, self.num_layers, block, arena)
        self._warm.add(rows > 1)

    def head(self, h: Tensor) -> Tensor:
        """h_N `[..., D]` to logits `[..., V]`: final norm, LM head, soft cap where the model has one."""
        return self.soft_cap(cast(Tensor, self.lm_head(self.final_norm(h))))

    def soft_cap(self, logits: Tensor) -> Tensor:
        """Gemma's final logit soft-capping; the identity elsewhere."""
        cap = getattr(self.config, "final_logit_softcapping", None)
        if not self.architecture.softcap or cap is None:
            return logits
        return torch.tanh(logits / cap) * cap


__all__ = ["ATTENTION_IMPLEMENTATIONS", "FULL", "SLIDING", "BaseModel", "Block"]

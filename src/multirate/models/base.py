"""The frozen base model as one layer loop over a KV arena.

`BaseModel` is the only place that runs transformers' decoder layers (compiled ones through `compiled`).
Plain decoding, prefill, verification of drafts, early exit and the accelerated stream's own slow layers
are all `run_layers(h, start, stop, block, arena)`; nothing else runs a layer. The module knows nothing
about tokens that are accepted or sampled.

Shapes: B rows, n block positions, L attended slots, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from multirate.config.errors import MultirateError
from multirate.models.ahead import POSITIONS, ROWS, SLOTS, VISIBLE
from multirate.models.architectures import FULL, SLIDING, architecture_of, layer_types
from multirate.models.arena import KVArena
from multirate.models.attention import GROUPED
from multirate.models.block import Block, Blocks, Rotary
from multirate.models.compiled import Compiled, compile_mode
from multirate.models.cuda_graphs import ArenaPool
from multirate.models.packed import PACKED, PackedLinear, can_pack, pack_linears
from multirate.models.packing import layer_packer
from multirate.models.quantized import (
    GROUP,
    is_exact,
    quantize_with_torchao,
    require_quantizable,
    stream_weights,
)
from multirate.models.stack import Stack, stack_of

ATTENTION_IMPLEMENTATIONS = ("sdpa", GROUPED, "eager")


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
        body = cast(nn.Module, model.get_decoder())
        self.embed_tokens = cast(nn.Embedding, body.embed_tokens)
        self.layers = cast(nn.ModuleList, body.layers)
        self.final_norm = cast(nn.Module, body.norm)
        self._blocks = Blocks(
            cast(nn.Module, body.rotary_emb),
            self.layer_types,
            window=getattr(self.config, "sliding_window", None),
            rotary_per_type=self.architecture.rotary_per_type,
            additive=attention == "eager",
        )
        self.lm_head = cast(nn.Linear | PackedLinear, model.get_output_embeddings())
        self._packing: str | None = None
        self._compiled: Compiled | None = None
        self._arenas: ArenaPool | None = None
        self._stack: Stack | None = None  # all layers
        # What was warmed up: the model or a stream, for batches of one row (False) or of several.
        self.warm: set[tuple[object, bool]] = set()

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
        stream_weights(self.model)
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
            pool=self._arenas,
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
        return self._blocks.make(
            starts,
            n,
            depths=depths,
            block_mask=block_mask,
            device=self.device,
            dtype=self.dtype,
        )

    def mask(self, allowed: Tensor) -> Tensor:
        """A bool mask (True = seen) in the form that the attention implementation reads."""
        return self._blocks.mask(allowed, self.dtype)

    def rotary(self, positions: Tensor) -> dict[str, Rotary]:
        """(cos, sin) for positions `[B, n]`, per attention type."""
        return self._blocks.rotary(positions, self.dtype)

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
        layers = list(self.layers)[start:stop]
        if self.compile_mode in ("model", "graphs") and len(layers) == self.num_layers:
            assert self._compiled is not None and self._stack is not None
            memory = [arena.memory(i) for i in range(start, stop)]
            every = [h, *self._compiled.layers(self._stack, h, block, memory)]
            if states is not None:
                states.update({i: self._compiled.lasting(every[i]) for i in states})
            return self._compiled.lasting(every[-1])
        arena.use(block, start, stop)
        for i, layer in enumerate(layers, start):
            if states is not None and i in states:
                states[i] = h
            h = self.run_layer(layer, i, h, block, arena)
        if states is not None and stop in states:
            states[stop] = h
        return h

    def run_layer(
        self, layer: nn.Module, index: int, h: Tensor, block: Block, arena: KVArena
    ) -> Tensor:
        """Run one decoder layer (the base's own, or a tied copy standing at `index`) on a block."""
        kind = self.layer_types[index]
        if self._compiled is not None and not self._compiled.failed:
            stack = stack_of(layer, kind)
            return self._compiled.layers(stack, h, block, (arena.memory(index),))[0]
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

    def run_whole(
        self,
        stack: Stack,
        inputs: Sequence[Tensor],
        block: Block,
        arena: KVArena,
        indices: Sequence[int],
    ) -> list[Tensor] | None:
        """A stack whose layers stand at `indices`, compiled as one; None where this cannot be."""
        if self._compiled is None:
            return None
        return self._compiled.whole(stack, inputs, block, [arena.memory(i) for i in indices])

    def compile(self, mode: str | None) -> None:
        """Run layers compiled from now on (`models.compiled`); for decoding only.

        Args:
            mode: "layers", "model", "graphs" (CUDA) or "auto"; "none" or None to run them eagerly.

        Raises:
            MultirateError: an unknown mode, or one that is not for this device.
        """
        chosen = compile_mode(mode, self.device)
        self._compiled = None if chosen is None else Compiled(chosen, self.device)
        self._arenas = ArenaPool() if chosen == "graphs" else None
        self._stack = Stack(
            tuple(self.layers), self.layer_types, name=f"{self.num_layers} decoder layers as one"
        )
        self.warm.clear()

    @property
    def compile_mode(self) -> str | None:
        """How layers are compiled; None if they run eagerly."""
        return None if self._compiled is None or self._compiled.failed else self._compiled.mode

    @property
    def compiles(self) -> bool:
        """Whether there is something to compile before text comes; captures belong to an arena."""
        return self.compile_mode not in (None, "graphs")

    @torch.inference_mode()
    def warm_up(self, rows: int) -> None:
        """Compile now what a batch of so many rows needs, and its last row, if it is not yet."""
        for several in {False, rows > 1}:
            if (self, several) in self.warm:
                continue
            for n in (POSITIONS, 1):
                if not self.compiles:
                    return
                block, arena = self.example(several=several, n=n)
                h = self.embed(torch.zeros_like(block.slots))
                self.run_layers(h, 0, self.num_layers, block, arena)
            self.warm.add((self, several))

    def example(self, *, several: bool, n: int) -> tuple[Block, KVArena]:
        """A block of n positions, and an arena for it, of sizes that nothing else has."""
        rows = ROWS if several else 1
        return self.block([VISIBLE - n] * rows, n), self.arena(rows=rows, max_len=SLOTS)

    def head(self, h: Tensor) -> Tensor:
        """h_N `[..., D]` to logits `[..., V]`: final norm, LM head, soft cap where the model has one."""
        return self.soft_cap(cast(Tensor, self.lm_head(self.final_norm(h))))

    @property
    def logit_cap(self) -> float | None:
        """Gemma's final logit soft-capping; None elsewhere."""
        if not self.architecture.softcap:
            return None
        return getattr(self.config, "final_logit_softcapping", None)

    def soft_cap(self, logits: Tensor) -> Tensor:
        """Logits as the model caps them."""
        return soft_cap(logits, self.logit_cap)


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """Logits squashed into (-cap, cap); None: as they are."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


__all__ = ["ATTENTION_IMPLEMENTATIONS", "FULL", "SLIDING", "BaseModel", "Block", "soft_cap"]

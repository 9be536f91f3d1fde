"""An accelerator: entry, accelerated layers and draft vocabulary over one frozen base model.

It knows how to take the stream one position further; it knows nothing about acceptance or text.

Shapes: B rows, n positions, D hidden size, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from multirate.config.accelerator import AcceleratorConfig, preset_config
from multirate.config.errors import MultirateError
from multirate.models.ahead import POSITIONS
from multirate.models.arena import KVArena
from multirate.models.base import SLIDING, BaseModel, Block
from multirate.models.packed import PACKED
from multirate.models.packing import draft_packer
from multirate.streams.entry import CarryEntry, FusedInputs
from multirate.streams.layers import LeanLayer, Prefix, TiedLayer
from multirate.streams.step import Ranking, WholeSteps

# Of the base model's bytes; two of thirty layers are just below it.
FOLD_LIMIT = 0.055


class Carried(NamedTuple):
    """What a position leaves behind for the next one.

    Attributes:
        states: each `[B, n, D]`: the slow states named by `carry_layers`, or the stream's own pair
            (p at entry, p at exit) after a drafted position. Empty for the gate entry.
        own: which of the two.
    """

    states: tuple[Tensor, ...]
    own: bool


class Guess(NamedTuple):
    """What a draft step makes of its positions.

    Attributes:
        logits: `[B, n, Vd]`.
        carried: what they leave behind.
        ranking: of the logits, where the step made it anyway.
    """

    logits: Tensor
    carried: Carried
    ranking: Ranking | None = None


class Accelerator(nn.Module):
    """The accelerated stream of one base model.

    Args:
        config: its shape.
        base: the model it runs beside; held by reference, never changed, not part of the state dict.

    Raises:
        MultirateError: the config was made for a model of another shape.
    """

    draft_ids: Tensor | None

    def __init__(self, config: AcceleratorConfig, base: BaseModel) -> None:
        super().__init__()
        shape = {
            "num_layers": base.num_layers,
            "hidden_size": base.hidden_size,
            "vocab_size": base.vocab_size,
        }
        for name, value in shape.items():
            if getattr(config, name) != value:
                raise MultirateError(
                    f"This accelerator was made for a base model with {name}="
                    f"{getattr(config, name)}, but the loaded model has {value}. Load the model it "
                    f"was trained for ({config.base_model_name_or_path or 'unknown'}), or make one "
                    f"for this model with `multirate train`."
                )
        self.config = config
        self.__dict__["base"] = base
        self.entry: CarryEntry | None = None
        if config.entry == "carry":
            self.entry = CarryEntry(len(config.carry_layers), config.hidden_size)
        self.layers = nn.ModuleList(self._layer(i) for i in config.schedule.layers)
        ids = None
        if config.draft_vocab_size is not None:
            ids = torch.arange(config.draft_vocab_size)
        self.register_buffer("draft_ids", ids)
        # Kept out of the module tree: what it is made of is the base's.
        self.__dict__["_draft_head"] = None
        self.__dict__["_whole"] = WholeSteps(self)
        self.to(base.device)

    base: BaseModel
    _draft_head: nn.Module | None
    _whole: WholeSteps

    @classmethod
    def from_preset(cls, preset: str, base: BaseModel, **overrides: Any) -> Accelerator:
        """A new accelerator of a preset's shape for this model; see `config.accelerator.preset_config`.

        Raises:
            MultirateError: an unknown preset or field, or a value that is not allowed.
        """
        config = preset_config(
            preset,
            num_layers=base.num_layers,
            hidden_size=base.hidden_size,
            vocab_size=base.vocab_size,
            num_attention_heads=base.config.num_attention_heads,
            **overrides,
        )
        return cls(config, base)

    def _layer(self, i: int) -> nn.Module:
        config, source = self.config, self.config.source_layer(i)
        if config.layer_kind == "tied":
            return TiedLayer(self.base, source, config.rank)
        return LeanLayer(
            self.base,
            source,
            rank=config.rank,
            num_heads=config.num_heads,
            attended_tokens=config.attended_tokens,
        )

    @property
    def carry_layers(self) -> tuple[int, ...]:
        """Slow states that the last verified position must hand over; empty for the gate entry."""
        return self.config.carry_layers if self.entry is not None else ()

    @property
    def needs_prefix(self) -> bool:
        """Lean layers attend to the verified prefix, which the caller must describe."""
        return self.config.layer_kind == "lean"

    def prefix(self, lengths: Sequence[int], positions: Tensor) -> Prefix | None:
        """The verified slots that rows at `positions` `[B, n]` see: `lengths[row]` leading ones."""
        if not self.needs_prefix:
            return None
        base, visible = self.base, max(lengths)
        keys = torch.arange(visible, device=positions.device)
        limit = torch.tensor(list(lengths), device=positions.device)[:, None, None]
        seen = (keys < limit).expand(-1, positions.shape[1], -1)
        window = getattr(base.config, "sliding_window", None) or 0
        masks = {
            kind: seen & (positions[..., None] - keys < window) if kind == SLIDING else seen
            for kind in set(base.layer_types)
        }
        return Prefix(visible, masks)

    def enter(self, ids: Tensor, carried: Carried, block: Block, arena: KVArena) -> Tensor:
        """p at the first gate for tokens `[B, n]`: fused (`carry`), or the slow state (`gate`).

        The gate entry runs the slow layers below the gate, which writes their keys and values.
        """
        embedding = self.base.embed(ids)
        if self.entry is not None:
            return cast(Tensor, self.entry(embedding, carried.states, own=carried.own))
        return self.base.run_layers(embedding, 0, self.config.gates[0], block, arena)

    def advance(
        self,
        p: Tensor,
        block: Block,
        arena: KVArena,
        prefix: Prefix | None,
        *,
        interval: int = 0,
        trace: list[Tensor] | None = None,
    ) -> Tensor:
        """p at gate `interval` to p at the next gate, both `[B, n, D]`.

        Args:
            p: the stream at the gate.
            block: where the positions sit.
            arena: keys and values of all layers.
            prefix: the verified slots (lean layers only).
            interval: which interval's layers to run.
            trace: if given, every p_i that is produced is appended to it.
        """
        first, gates = self.config.gates[0], self.config.gates
        for layer in self.layers[gates[interval] - first : gates[interval + 1] - first]:
            p = layer(p, block, arena, prefix)
            if trace is not None:
                trace.append(p)
        return p

    def step(
        self, ids: Tensor, carried: Carried, block: Block, arena: KVArena, prefix: Prefix | None
    ) -> tuple[Tensor, Carried]:
        """Take the stream over tokens `[B, n]`: draft logits `[B, n, Vd]` and what it leaves behind."""
        start = self.enter(ids, carried, block, arena)
        end = self.advance(start, block, arena, prefix)
        left = (start, end) if self.entry is not None else ()
        return self.draft_logits(end), Carried(left, own=True)

    def guess(
        self,
        ids: Tensor,
        carried: Carried,
        block: Block,
        arena: KVArena,
        prefix: Prefix | None = None,
        *,
        last: Tensor | None = None,
    ) -> Guess:
        """As `step`, in the fastest way there is.

        Args:
            ids: `[B, n]`.
            carried: what a position before each of them left behind.
            block: where the positions sit.
            arena: keys and values of the stream's layers.
            prefix: the verified slots (lean layers only).
            last: `[B, 1]`, the only position of each row that is wanted; None for all of them.
        """
        out = self._whole.run(ids, carried.states, block, arena, own=carried.own, last=last)
        if out is not None:
            start, end, logits, tokens, chances = out
            return Guess(logits, Carried((start, end), own=True), Ranking(tokens, chances))
        if last is None:
            return Guess(*self.step(ids, carried, block, arena, prefix))
        start = self.enter(ids, carried, block, arena)
        end = self.advance(start, block, arena, prefix)
        row = torch.arange(len(last), device=last.device)[:, None]
        left = start[row, last], end[row, last]
        return Guess(self.draft_logits(left[1]), Carried(left, own=True))

    @torch.inference_mode()
    def warm_up(self, rows: int) -> None:
        """Compile now what drafting for so many rows needs, and for the last row, if it is not yet."""
        base, own_kv = self.base, self.config.own_kv
        for several in {False, rows > 1}:
            if (self, several) in base.warm:
                continue
            for own, n in ((False, 1), (True, 1), (True, POSITIONS), (False, POSITIONS)):
                if not base.compiles:
                    return
                if n > 1 and not own and not own_kv:
                    continue  # only with keys and values of its own it reads several tokens at once
                block, arena = base.example(several=several, n=n)
                ids = torch.zeros_like(block.slots)
                states = 0 if self.entry is None else 2 if own else len(self.carry_layers)
                carried = Carried((base.embed(ids),) * states, own)
                prefix = self.prefix([block.visible - n] * len(ids), block.positions)
                last = ids[:, :1] if own_kv and not own else None
                self.guess(ids, carried, block, arena, prefix, last=last)
            base.warm.add((self, several))

    def draft_logits(self, p: Tensor) -> Tensor:
        """p at the exit `[..., D]` to logits over the draft vocabulary `[..., Vd]`."""
        base = self.base
        return base.soft_cap(cast(Tensor, self.draft_head()(base.final_norm(p.to(base.dtype)))))

    def draft_head(self) -> nn.Module:
        """The base's LM head for the draft vocabulary."""
        if self.draft_ids is None:
            return self.base.lm_head
        if self._draft_head is None:
            # A copy of those rows: gathering them at every step would cost more than it saves. Made
            # outside inference mode, whose tensors could not be used in training later.
            with torch.inference_mode(False), torch.no_grad():
                self.__dict__["_draft_head"] = self._draft_linear(self.draft_ids)
        return cast(nn.Module, self._draft_head)

    def _draft_linear(self, ids: Tensor) -> nn.Linear:
        rows = cast(nn.Linear, self.base.lm_head).weight[ids].detach()
        head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        head.weight = nn.Parameter(rows, requires_grad=False)
        return head

    def set_draft_ids(self, ids: Tensor) -> None:
        """Choose the draft vocabulary: `[Vd]` distinct token ids of the base's vocabulary.

        Raises:
            MultirateError: wrong count, an id outside the base's vocabulary, or one named twice.
        """
        size, vocab = self.config.draft_vocab_size, self.config.vocab_size
        problem = None
        if size is None or ids.shape != (size,):
            problem = f"holds {ids.numel()} ids, but draft_vocab_size is {size}"
        elif bool(((ids < 0) | (ids >= vocab)).any()):
            worst = int(ids.max()) if int(ids.max()) >= vocab else int(ids.min())
            problem = f"names token {worst}, outside the base model's vocabulary of {vocab}"
        elif ids.unique().numel() != ids.numel():
            problem = "names a token twice"
        if problem is not None:
            raise MultirateError(
                f"The draft vocabulary {problem}. Make the accelerator again with `multirate train`."
            )
        self.draft_ids = ids.to(device=self.base.device, dtype=torch.long)
        self.__dict__["_draft_head"] = None

    def fold(self) -> None:
        """Make drafting faster by folding adapters into copies of weights, where memory allows.

        Layers are folded from the first on, as many as `FOLD_LIMIT` of the base model's bytes holds.
        """
        if self.base.packed:  # `pack` has folded all of them
            return
        room = FOLD_LIMIT * sum(p.nbytes for p in self.base.model.parameters())
        for layer in self.layers:
            if isinstance(layer, TiedLayer):
                room -= layer.fold_bytes()
                if room < 0:
                    return
                layer.fold()

    def pack(self, kind: str = PACKED) -> None:
        """Draft from packed weights; call it just before the base's own `pack`, of the same kind.

        Adapters are folded into the weights, or stay beside those that 4 bits hold. It cannot be
        trained afterwards.

        Args:
            kind: "packed" (`models.packed`), or "int8" or "int4" (`models.quantized`).
        """
        pack = draft_packer(kind, self.base.device)
        for layer in self.layers:
            if isinstance(layer, TiedLayer):
                layer.pack(pack)
        if self.base.device.type == "cpu":
            self.float()
        for module in self.modules():
            if isinstance(module, FusedInputs):
                module.pack(pack)
        if self.draft_ids is not None:
            self.__dict__["_draft_head"] = pack(self._draft_linear(self.draft_ids))

    def num_parameters(self) -> int:
        """Trained numbers of the accelerator (the base's are not its own)."""
        return sum(p.numel() for p in self.parameters())

    # Folders are the business of `streams.folder`, imported late because it makes accelerators.

    def save_pretrained(
        self,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        license: str = "apache-2.0",
        command: str | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Save as a folder, whole or not at all; see `streams.folder.save_accelerator`."""
        from multirate.streams.folder import save_accelerator

        return save_accelerator(
            self, path, dtype=dtype, license=license, command=command, overwrite=overwrite
        )

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | Path,
        base: BaseModel,
        *,
        revision: str | None = None,
        dtype: torch.dtype | None = None,
        **hub: Any,
    ) -> Accelerator:
        """Load from a folder or the hub; see `streams.folder.load_accelerator`."""
        from multirate.streams.folder import load_accelerator

        return load_accelerator(path_or_hub_id, base, revision=revision, dtype=dtype, **hub)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload to the hub; see `streams.folder.push_accelerator`."""
        from multirate.streams.folder import push_accelerator

        return push_accelerator(self, repo_id, **options)

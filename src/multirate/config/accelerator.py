"""What an accelerator is made of: the config that is saved beside its weights, and the presets."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from multirate.config.errors import MultirateError
from multirate.config.schedule import RateSchedule

Entry = Literal["gate", "carry"]
LayerKind = Literal["lean", "tied"]


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True)
class AcceleratorConfig:
    """The shape of an accelerated stream over one base model.

    Raises:
        MultirateError: a field outside its allowed set; the message names value, allowed and fix.
    """

    num_layers: int = field(metadata=_help("N, layers of the base model"))
    hidden_size: int = field(metadata=_help("D, width of the residual stream"))
    vocab_size: int = field(metadata=_help("rows of the base model's LM head"))
    gates: tuple[int, ...] = field(metadata=_help("E_0 < ... < E_J; drafts run interval 0"))
    entry: Entry = field(
        default="carry",
        metadata=_help("where p starts: `gate` = the slow state, `carry` = a fusion of embedding "
                       "and the previous position's deep states"),
    )  # fmt: skip
    layer_kind: LayerKind = field(
        default="tied",
        metadata=_help("`lean` = own low-rank modules over the arena's KV, `tied` = base layers run "
                       "again with low-rank adapters"),
    )  # fmt: skip
    rank: int = field(default=64, metadata=_help("rank of every adapter"))
    num_heads: int = field(default=0, metadata=_help("lean layers: query heads"))
    attended_tokens: int | None = field(
        default=None, metadata=_help("lean layers: attend to the best-scoring tokens only")
    )
    carry_layers: tuple[int, ...] = field(
        default=(),
        metadata=_help("slow states of the previous position that the carry entry fuses"),
    )
    own_kv: bool = field(
        default=False,
        metadata=_help(
            "tied layers keep keys and values of their own instead of reading the base's"
        ),
    )
    draft_vocab_size: int | None = field(
        default=None, metadata=_help("tokens that drafts may propose; None = all")
    )
    preset: str = field(default="custom", metadata=_help("preset this config came from"))
    base_model_name_or_path: str = field(default="", metadata=_help("base model"))
    revision: str | None = field(default=None, metadata=_help("base model's revision"))
    base_fingerprint: str = field(default="", metadata=_help("hash of the base model's config"))
    expected_acceptance: tuple[float, ...] = field(
        default=(),
        metadata=_help("held-out probability that draft i is accepted given that those before it "
                       "were; the drafter's prior until it has seen this prompt"),
    )  # fmt: skip
    library_version: str = field(default="", metadata=_help("multirate version that saved it"))

    def __post_init__(self) -> None:
        for name in ("gates", "carry_layers", "expected_acceptance"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _one_of("entry", self.entry, get_args(Entry))
        _one_of("layer_kind", self.layer_kind, get_args(LayerKind))
        for name in ("num_layers", "hidden_size", "vocab_size", "rank"):
            _at_least(name, getattr(self, name), 1)
        schedule = self.schedule  # validates the gates
        if self.layer_kind == "lean":
            _at_least("num_heads", self.num_heads, 1)
        if self.own_kv and (self.entry, self.layer_kind) != ("carry", "tied"):
            raise MultirateError(
                f"own_kv=True needs entry='carry' and layer_kind='tied', not {self.entry!r} and "
                f"{self.layer_kind!r}."
            )
        if self.attended_tokens is not None:
            _at_least("attended_tokens", self.attended_tokens, 1)
        if self.entry == "carry":
            if not self.carry_layers or not all(
                0 <= i <= self.num_layers for i in self.carry_layers
            ):
                raise MultirateError(
                    f"carry_layers={list(self.carry_layers)} must name at least one slow state, each "
                    f"from 0 to {self.num_layers}."
                )
            if schedule.num_intervals != 1:
                raise MultirateError(
                    f"The carry entry drives one interval, but gates={list(self.gates)} make "
                    f"{schedule.num_intervals}. Use two gates, or entry='gate'."
                )
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise MultirateError(
                f"draft_vocab_size={self.draft_vocab_size} must be from 1 to {self.vocab_size}, the "
                f"base model's vocabulary."
            )

    @property
    def schedule(self) -> RateSchedule:
        return RateSchedule(self.num_layers, self.gates)

    def source_layer(self, i: int) -> int:
        """The base layer that accelerated layer i reads: it produces the state that p_{i+1} aims at."""
        return self.schedule.target_layer(i + 1) - 1

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> AcceleratorConfig:
        """Read a saved config. Keys of a newer version are dropped with a warning.

        Raises:
            MultirateError: a required key is missing or a value is not allowed.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - names)
        if unknown:
            warnings.warn(
                f"Accelerator config has keys this version does not know, ignored: {unknown}",
                stacklevel=2,
            )
        required = ("num_layers", "hidden_size", "vocab_size", "gates")
        missing = [name for name in required if name not in data]
        if missing:
            raise MultirateError(
                f"Accelerator config lacks {missing}. It may be damaged or no multirate accelerator; "
                f"make it again with `multirate train`."
            )
        try:
            return cls(**{k: v for k, v in data.items() if k in names})
        except TypeError as error:
            raise MultirateError(
                f"Accelerator config holds a value of a wrong type: {error}"
            ) from None


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise MultirateError(f"{name}={value!r} is not known. Allowed: {', '.join(allowed)}.")


def _at_least(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise MultirateError(f"{name}={value!r} must be a whole number of at least {low}.")


PRESETS = ("carry", "paper", "eagle")


def preset_config(
    preset: str,
    *,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    num_attention_heads: int,
    **overrides: Any,
) -> AcceleratorConfig:
    """The config of a named preset for a base model of this shape.

    `paper`: what M2R2 publishes for speculation: gate entry at layer 0, k = 4 lean layers at rate
    R = N/k, rank 8, a quarter of the heads (8 of 32), the 64 best-scoring tokens attended.
    `carry`: what worked best here: the last base layers, a seventh of them but two to four, run again
    (`tied`) on a fusion of the token's embedding with the previous position's deep states.
    `eagle`: a rival's shape, EAGLE-3's (arXiv 2503.01840), as near as these parts come: one decoder
    layer with keys and values of its own, features of layers 2, N/2 and N-3, recurrent on its own
    output and trained on it. It differs in that the layer is the base's last one with adapters of a
    high rank instead of a new one, in that embedding and features are fused before the layer (as in
    EAGLE-1) instead of inside its attention, and in its closed-form start.

    Args:
        preset: one of `PRESETS`.
        num_layers: N.
        hidden_size: D.
        vocab_size: rows of the LM head.
        num_attention_heads: query heads of the base model.
        overrides: fields of `AcceleratorConfig` that replace the preset's.

    Raises:
        MultirateError: an unknown preset or field, or a value that is not allowed.
    """
    n = num_layers
    shape = {"num_layers": n, "hidden_size": hidden_size, "vocab_size": vocab_size}
    chosen: dict[str, Any]
    if preset == "paper":
        chosen = {
            "entry": "gate", "layer_kind": "lean", "gates": (0, min(4, n)), "rank": 8,
            "num_heads": max(1, round(num_attention_heads * 8 / 32)), "attended_tokens": 64,
        }  # fmt: skip
    elif preset == "carry":
        k = min(n, max(2, min(4, n // 7)))
        deep = sorted({round(n / 3), round(2 * n / 3), n - k, n})
        chosen = {
            "entry": "carry", "layer_kind": "tied", "gates": (n - k, n), "rank": 64,
            "carry_layers": tuple(deep), "draft_vocab_size": min(16384, vocab_size),
        }  # fmt: skip
    elif preset == "eagle":
        features = sorted({min(2, n), n // 2, max(0, n - 3)})
        chosen = {
            "entry": "carry", "layer_kind": "tied", "gates": (n - 1, n), "rank": 128, "own_kv": True,
            "carry_layers": tuple(features), "draft_vocab_size": min(16384, vocab_size),
        }  # fmt: skip
    else:
        raise MultirateError(f"preset={preset!r} is not known. Allowed: {', '.join(PRESETS)}.")
    names = {f.name for f in dataclasses.fields(AcceleratorConfig)}
    unknown = sorted(set(overrides) - names)
    if unknown:
        raise MultirateError(f"Unknown accelerator settings {unknown}. Allowed: {sorted(names)}.")
    return AcceleratorConfig(**{**shape, **chosen, "preset": preset, **overrides})

"""Other methods' drafters in our own engine: what each needs, and where it is found.

Trained rivals lie in `data/` of the repository, as `data/rivals/MODEL-METHOD` and, for shapes of our own
accelerator, `data/accelerators/MODEL-METHOD`; `docs/rivals.md` says how each was made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers import PreTrainedTokenizerBase

from multirate.config.errors import MultirateError
from multirate.decode.deed import DeedDrafter
from multirate.decode.drafter import Drafter
from multirate.decode.engine import Engine, load
from multirate.decode.lookahead import LookaheadDrafter
from multirate.decode.medusa import MedusaDrafter
from multirate.decode.rivals import ModelDrafter
from multirate.decode.stream import AcceleratorDrafter
from multirate.models.base import BaseModel
from multirate.models.quantized import QUANTIZATIONS
from multirate.streams.accelerator import Accelerator

if TYPE_CHECKING:
    from multirate.bench.options import SpeculativeOptions

# Texts that tokenizers of different families split differently, or give other ids.
_PROBES = (
    "Hello, world! 1234567890",
    "def f(x):\n    return {'a': [x ** 2]}\n\n\t# twice  two   spaces",
    "Größe, naïve, Ελλάδα, Привет, こんにちは, 你好, 🙂",
)


@dataclass(frozen=True)
class Rival:
    """A drafter to compare with.

    Attributes:
        engine: an engine that drafts with it, beside a loaded one.
        check: raises a MultirateError where something that was asked for is missing; called before a
            model is loaded.
        find_weights: finds its trained weights for a model of this name; raises a MultirateError where
            there are none.
        options: fields of `GenerationOptions` where the number of drafts is not asked for; without
            any, the engine chooses it.
    """

    engine: Callable[[Engine, SpeculativeOptions], Engine]
    check: Callable[[SpeculativeOptions], None] = lambda settings: None
    find_weights: Callable[[str], object] = lambda model: None
    options: Mapping[str, Any] = field(default_factory=dict)


def _drafting(engine: Engine, drafter: Drafter) -> Engine:
    return Engine(engine.base, tokenizer=engine.tokenizer, drafter=drafter)


def _heads(method: str, make: Callable[[Path, BaseModel], Drafter]) -> Rival:
    """Trained heads on the loaded model."""

    def find(model: str) -> Path:
        command = f"python scripts/train_rival.py {method} MODEL --data TEXT.jsonl"
        return _folder("rivals", model, method, command)

    def engine(engine: Engine, settings: SpeculativeOptions) -> Engine:
        return _drafting(engine, make(find(engine.base.config.name_or_path), engine.base))

    return Rival(engine, find_weights=find)


def _preset(preset: str, kind: str) -> Rival:
    """An accelerator of another shape, on a model of its own: accelerators come before packing."""

    def find(model: str) -> Path:
        command = f"multirate train MODEL --preset {preset} --data TEXT.jsonl"
        return _folder(kind, model, preset, command)

    def engine(engine: Engine, settings: SpeculativeOptions) -> Engine:
        model = engine.base.config.name_or_path
        loaded = _load_like(engine, model, find(model))
        return _drafting(loaded, AcceleratorDrafter(cast(Accelerator, loaded.accelerator)))

    return Rival(engine, find_weights=find)


def _two_models(engine: Engine, settings: SpeculativeOptions) -> Engine:
    """The model that --draft-model names drafts."""
    assert settings.draft_model is not None
    small = _load_like(engine, settings.draft_model)
    require_same_tokens(small.tokenizer, engine.tokenizer, name=settings.draft_model)
    return _drafting(engine, ModelDrafter(small.base, engine.base))


def _require_draft_model(settings: SpeculativeOptions) -> None:
    if settings.draft_model is None:
        raise MultirateError(
            "Method 'two-model' needs a smaller model of the same family (--draft-model MODEL), or "
            "leave it out (--methods)."
        )


RIVALS: dict[str, Rival] = {
    "paper": _preset("paper", "accelerators"),
    "eagle": _preset("eagle", "rivals"),
    "medusa": _heads("medusa", MedusaDrafter.from_folder),
    "deed": _heads("deed", DeedDrafter.from_folder),
    "two-model": Rival(_two_models, _require_draft_model),
    # As published, it guesses in every pass: it has nothing to draft before it has guessed.
    "lookahead": Rival(
        lambda engine, settings: _drafting(engine, LookaheadDrafter()),
        options={"num_draft_tokens": 4, "draft_width": 7},
    ),
}


def _load_like(engine: Engine, model: str, accelerator: Path | None = None) -> Engine:
    """Load a model in the form of one that is loaded, compiled if that is."""
    kind = engine.base.dtype_name
    quantized = kind in QUANTIZATIONS
    return load(
        model,
        accelerator,
        dtype=None if quantized else kind,
        quantize=kind if quantized else None,
        device=str(engine.base.device),
        compile=engine.base.compile_mode,
    )


def _folder(kind: str, model: str, method: str, command: str) -> Path:
    """Where a rival of this model lies: below here, or in the repository that this file is in.

    Raises:
        MultirateError: in neither.
    """
    name = f"{Path(model or 'MODEL').name}-{method}"
    here = Path("data") / kind / name
    for folder in (here, Path(__file__).resolve().parents[3] / here):
        if folder.is_dir():
            return folder
    raise MultirateError(
        f"Method {method!r} needs {here}, which is not there: it is no part of the installed package. "
        f"Run in the repository, or make it: {command} --output {here}"
    )


def require_same_tokens(
    draft: PreTrainedTokenizerBase | None, base: PreTrainedTokenizerBase | None, *, name: str
) -> None:
    """Check that two models' token ids mean the same: the same vocabulary, and the same ids for texts.

    Args:
        draft: the drafting model's tokenizer.
        base: the verifying model's.
        name: of the drafting model, for the message.

    Raises:
        MultirateError: one has none, or they differ.
    """
    if draft is None or base is None:
        raise MultirateError(
            f"Whether {name} has the model's tokens cannot be told: a tokenizer is missing. Add the "
            f"tokenizer files to its folder."
        )
    same = draft.get_vocab() == base.get_vocab()
    if same and all(draft(text).input_ids == base(text).input_ids for text in _PROBES):
        return
    raise MultirateError(
        f"{name} gives other token ids for the same text than the model: its drafts would mean "
        f"something else. Choose a drafting model of the same family, with the same tokenizer."
    )

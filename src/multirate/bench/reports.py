"""Two saved reports of `multirate bench speculative`, side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multirate.config.errors import MultirateError

_FIX = "Give files that `multirate bench speculative --output FILE` wrote."

# What must be alike for speeds to be compared: a name, and where it stands in a report.
_ALIKE: dict[str, tuple[tuple[str, ...], ...]] = {
    "machine": (
        ("provenance", "machine", "cpu"),
        ("provenance", "machine", "usable_cores"),
        ("provenance", "machine", "device"),
        ("provenance", "torch_threads"),
    ),
    "dtype": (("provenance", "dtype"),),
    "model": (("provenance", "model"),),
    "decoding": (("provenance", "decoding"),),
    "prompt set": (("provenance", "prompt_set", "name"), ("provenance", "prompt_set", "sha256")),
    "number of prompts": (("prompts",),),
    "new tokens": (("new_tokens",),),
}


@dataclass(frozen=True)
class Pair:
    """A number of the first report and the second's; None where a report has none."""

    a: float | None
    b: float | None

    @property
    def ratio(self) -> float | None:
        """The second over the first."""
        return self.b / self.a if self.a and self.b is not None else None

    def to_dict(self) -> dict[str, float | None]:
        return {"a": self.a, "b": self.b, "ratio": self.ratio}


@dataclass(frozen=True)
class MethodPair:
    """One method in both reports: medians over prompts."""

    tokens_per_second: Pair
    speedup_vs_plain: Pair

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens_per_second": self.tokens_per_second.to_dict(),
            "speedup_vs_plain": self.speedup_vs_plain.to_dict(),
        }


@dataclass(frozen=True)
class ReportComparison:
    """Two reports.

    Attributes:
        methods: those that both have, in the first one's order.
        warnings: what differs between the two although speeds depend on it.
        only_a: methods of the first report alone.
        only_b: methods of the second report alone.
    """

    methods: dict[str, MethodPair]
    warnings: tuple[str, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "methods": {name: pair.to_dict() for name, pair in self.methods.items()},
            "warnings": list(self.warnings),
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
        }


def read_report(path: Path) -> dict[str, Any]:
    """A report that `multirate bench speculative --output FILE` or `--json` wrote.

    Raises:
        MultirateError: no such file, or it holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MultirateError(f"Cannot read {path}: {error.strerror or error}.") from None
    except ValueError as error:  # no JSON, or no UTF-8
        raise MultirateError(f"{path} is no JSON file: {error}. {_FIX}") from None
    for place in (("provenance",), ("methods",)):
        if not isinstance(_at(data, place), dict):
            raise MultirateError(f"{path} is no bench report: it has no {place[0]!r}. {_FIX}")
    for name, method in data["methods"].items():
        median = _at(method, ("tokens_per_second", "median"))
        speedup = _at(method, ("speedup_vs_plain",))
        if not isinstance(median, int | float) or not isinstance(speedup, int | float | None):
            raise MultirateError(f"{path} is no bench report: {name!r} has no speeds. {_FIX}")
    return dict(data)


def compare_reports(a: dict[str, Any], b: dict[str, Any]) -> ReportComparison:
    """Put two reports (see `read_report`) side by side.

    Raises:
        MultirateError: they have no method in common.
    """
    ours, theirs = a["methods"], b["methods"]
    both = [name for name in ours if name in theirs]
    if not both:
        raise MultirateError(
            f"The two reports have no method in common: {', '.join(ours) or 'none'} in the first, "
            f"{', '.join(theirs) or 'none'} in the second."
        )
    return ReportComparison(
        methods={name: _pair(ours[name], theirs[name]) for name in both},
        warnings=tuple(_warnings(a, b)),
        only_a=tuple(name for name in ours if name not in theirs),
        only_b=tuple(name for name in theirs if name not in ours),
    )


def _pair(a: dict[str, Any], b: dict[str, Any]) -> MethodPair:
    return MethodPair(
        Pair(a["tokens_per_second"]["median"], b["tokens_per_second"]["median"]),
        Pair(a["speedup_vs_plain"], b["speedup_vs_plain"]),
    )


def _warnings(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    found = []
    for what, places in _ALIKE.items():
        values = [[_at(report, place) for place in places] for report in (a, b)]
        if values[0] != values[1]:
            left, right = (", ".join(map(_short, own)) for own in values)
            found.append(f"{what} differs: {left} against {right}")
    return found


def _short(value: Any) -> str:
    """A value as text; of a hash, as much as tells it from others."""
    text = str(value)
    return text[:12] if len(text) == 64 else text


def _at(data: Any, place: tuple[str, ...]) -> Any:
    """What stands at a place within objects; None if there is nothing."""
    for key in place:
        data = data.get(key) if isinstance(data, dict) else None
    return data

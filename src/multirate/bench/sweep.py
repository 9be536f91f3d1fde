"""One measurement after another: batch sizes, context lengths, temperatures, each on its own.

Speculative decoding that adapts may help less in some of them; that it never costs much is what
`SweepReport.slow` checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

from multirate.bench.options import SpeculativeOptions
from multirate.bench.prompts import PromptSet
from multirate.bench.speculative import Progress, SpeculativeReport, bench_speculative
from multirate.decode.engine import Engine


@dataclass(frozen=True)
class Setting:
    """What differs from one measurement to the next; see `SpeculativeOptions`."""

    batch: int = 1
    context: int | None = None
    temperature: float = 0.0

    def __str__(self) -> str:
        context = "" if self.context is None else f", context {self.context}"
        return f"batch {self.batch}{context}, temperature {self.temperature:g}"


@dataclass(frozen=True)
class SweepReport:
    """Reports in the order of their settings."""

    reports: tuple[tuple[Setting, SpeculativeReport], ...]

    def slow(self, least: float) -> list[str]:
        """Where a method's speed-up over plain decoding is below `least`, in words."""
        return [
            f"{setting}: {name} {summary.speedup_vs_plain:.2f}x"
            for setting, report in self.reports
            for name, summary in report.methods.items()
            if summary.speedup_vs_plain is not None and summary.speedup_vs_plain < least
        ]

    def to_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "settings": [
                {**asdict(setting), "report": report.to_dict()} for setting, report in self.reports
            ]
        }


def settings(
    batches: Sequence[int], contexts: Sequence[int], temperatures: Sequence[float]
) -> list[Setting]:
    """Each value on its own, with the usual (one prompt as it is, greedy) for all else."""
    wanted = [
        *(Setting(batch=batch) for batch in batches),
        *(Setting(context=context) for context in contexts),
        *(Setting(temperature=temperature) for temperature in temperatures),
    ]
    return list(dict.fromkeys(wanted))


def bench_sweep(
    engine: Engine,
    prompts: PromptSet,
    options: Sequence[tuple[Setting, SpeculativeOptions]],
    *,
    accelerator: str | None = None,
    progress: Callable[[Setting], AbstractContextManager[Progress]],
) -> SweepReport:
    """Measure every setting with the same engine and prompts.

    Args:
        engine: with an accelerator where a method needs one.
        prompts: all of them are decoded in every setting.
        options: of each setting, made by `with_setting` before anything slow starts.
        accelerator: what the engine's accelerator is called, for the provenance.
        progress: opened for each setting.

    Raises:
        MultirateError: as `bench_speculative`.
    """
    reports = []
    for setting, own in options:
        with progress(setting) as advance:
            report = bench_speculative(
                engine, prompts, own, accelerator=accelerator, progress=advance
            )
        reports.append((setting, report))
    return SweepReport(tuple(reports))


def with_setting(options: SpeculativeOptions, setting: Setting) -> SpeculativeOptions:
    """The same options in one setting.

    Raises:
        MultirateError: a method cannot do what the setting asks.
    """
    return replace(options, **asdict(setting))

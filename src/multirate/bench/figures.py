"""The figure of a speculative benchmark: speed-up and acceptance length of every method.

It shows what the M2R2 paper shows of its own method in Fig. 8 (arXiv:2502.02040).
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from multirate.bench.style import BLACK, BLUE, GREY, SKY, STYLE, label_panel, titled_figure

# No date in the file: the same numbers make the same figure.
_UNDATED: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def draw_speculative(report: Mapping[str, Any], suffix: str) -> bytes:
    """Bars of a report: left the speed-up with its 95% confidence interval, right the acceptance length.

    Args:
        report: as `SpeculativeReport.to_dict` makes it, with `plain` among its methods.
        suffix: of the format wanted, such as ".png".

    Returns:
        The file's contents.
    """
    with matplotlib.rc_context(STYLE):
        file = io.BytesIO()
        _figure(report).savefig(
            file, format=suffix.removeprefix("."), dpi=150, metadata=_UNDATED.get(suffix)
        )
        return file.getvalue()


def _figure(report: Mapping[str, Any]) -> Figure:
    methods, source = report["methods"], report["provenance"]
    threads = source["torch_threads"]
    figure, (speed, length) = titled_figure(
        "Speculative decoding: speed-up and acceptance length",
        f"{source['model']}, {source['dtype']}, {source['prompt_set']['name']}: {report['prompts']} "
        f"prompts x {report['new_tokens']} new tokens, {source['decoding']}\n"
        f"{source['machine']['cpu']}, {threads} thread{'' if threads == 1 else 's'}, "
        f"{source['machine']['device']}",
        size=(11, 1.9 + 0.36 * len(methods)),
    )
    names = list(methods)
    speedups = [methods[name]["speedup_vs_plain"] for name in names]
    intervals = [methods[name]["speedup_vs_plain_ci"] for name in names]
    shown = [f"{value:.2f}x" for value in speedups]
    _bars(speed, names, speedups, shown, [ci[1] if ci else 0.0 for ci in intervals])
    for place, ci in enumerate(intervals):
        if ci is not None:
            speed.plot(ci, [place, place], color=BLACK, linewidth=1.4, marker="|", markersize=7)
    speed.axvline(1, color=GREY, linewidth=1, linestyle=":")
    label_panel(
        speed, "Speed-up", "tokens/s over plain's, median over prompts and 95% interval", ""
    )

    lengths = [methods[name]["mean_acceptance_length"] for name in names]
    shown = ["-" if value is None else f"{value:.2f}" for value in lengths]
    _bars(length, names, [value or 0.0 for value in lengths], shown)
    length.set_yticklabels([])
    label_panel(length, "Mean acceptance length", "tokens a draft step yields", "")
    return figure


def _bars(
    axis: Axes,
    names: Sequence[str],
    values: Sequence[float],
    shown: Sequence[str],
    ends: Sequence[float] = (),
) -> None:
    """Horizontal bars, the first on top, each with its number behind it and behind its interval."""
    places = range(len(names))
    colours = [GREY if name == "plain" else BLUE if "multirate" in name else SKY for name in names]
    axis.barh(places, values, color=colours, height=0.66)
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    furthest = [max(pair) for pair in zip(values, ends or values, strict=True)]
    axis.set_xlim(0, 1.15 * max(*furthest, 1.0))
    for place, end, text in zip(places, furthest, shown, strict=True):
        axis.annotate(text, (end, place), xytext=(6, 0), textcoords="offset points", va="center",
                      fontsize=9)  # fmt: skip

"""The figures, drawn from an analysis's numbers alone."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from multirate.bench.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    SKY,
    STYLE,
    label_panel,
    titled_figure,
)

_CLASS_COLOURS = {
    "prompt": GREY, "word start": BLUE, "word piece": SKY, "digits": GREEN,
    "punctuation": ORANGE, "line breaks, special": PINK, "all": BLACK,
}  # fmt: skip
_METHODS = {
    "raw exit": (GREY, "x"), "linear": (SKY, "s"), "LITE-style": (ORANGE, "D"),
    "carry": (PINK, "P"), "lean": (BLUE, "o"), "tied": (GREEN, "^"),
}  # fmt: skip


def draw(name: str, numbers: dict[str, Any], suffixes: Sequence[str]) -> dict[str, bytes]:
    """One figure of an analysis, as the contents of files.

    Args:
        name: one of `multirate.analyze.tasks.FIGURES`.
        numbers: of the whole analysis; see `multirate.analyze.run.analyze`.
        suffixes: of the formats wanted, such as ".png".
    """
    files = {}
    with matplotlib.rc_context(STYLE):
        figure = _DRAW[name](numbers[name], _subtitle(numbers))
        for suffix in suffixes:
            file = io.BytesIO()
            # No date in the file: the same numbers make the same figure.
            metadata = {"Date": None} if suffix == ".svg" else None
            figure.savefig(file, format=suffix.removeprefix("."), dpi=150, metadata=metadata)
            files[suffix] = file.getvalue()
    return files


def _subtitle(numbers: dict[str, Any]) -> str:
    model, text = numbers["provenance"]["model"], numbers["text"]
    layers = numbers["model"]["num_layers"]
    if not text:
        return f"{model}, {layers} layers"
    return (
        f"{model}, {layers} layers; fitted on {text['fitted']['positions']:,} and judged on "
        f"{text['heldout']['positions']:,} held-out positions"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _whole_numbers(axis: Axes) -> None:
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


# ------------------------------------------------------------------------------ the five figures


def _velocity(numbers: dict[str, Any], subtitle: str) -> Figure:
    count = numbers["classes"]["all"]["positions"]
    source = subtitle.split(";")[0]
    figure, (turn, stretch, final) = titled_figure(
        "Residual velocity: how far each layer moves the residual stream",
        f"{source}; mean over {count:,} positions, by the token that the position reads",
        columns=3, size=(14, 4.9),
    )  # fmt: skip
    for name, row in numbers["classes"].items():
        share = row["positions"] / count
        style: dict[str, Any] = {"color": _CLASS_COLOURS[name], "label": f"{name} ({share:.0%})"}
        if name == "all":
            style |= {"label": "all", "linewidth": 2.8, "zorder": 5}
        n = len(row["direction_change"])
        turn.plot(range(1, n + 1), row["direction_change"], **style)
        stretch.plot(range(1, n + 1), row["norm_ratio"], **style)
        final.plot(range(n + 1), row["cosine_to_final"], **style)
    label_panel(turn, "Change of direction", "layer i", "1 - cos(h$_{i-1}$, h$_i$)")
    label_panel(stretch, "Change of norm", "layer i", "|h$_i$| / |h$_{i-1}$| (log scale)")
    label_panel(final, "Cosine to the final state", "state after layer i (0 = embedding)",
                "cos(h$_i$, h$_N$)")  # fmt: skip
    for axis in (turn, stretch, final):
        _whole_numbers(axis)
    turn.set_ylim(bottom=0)
    stretch.set_yscale("log")
    _plain_log(stretch, "y")
    stretch.axhline(1, color=GREY, linewidth=1, linestyle=":")
    figure.legend(*turn.get_legend_handles_labels(), loc="outside right center",
                  title="token read (share)", alignment="left")  # fmt: skip
    return figure


def _rates(numbers: dict[str, Any], subtitle: str) -> Figure:
    starts = numbers["starts"]
    figure, axes = titled_figure(
        f"Rate: {_count(numbers['layers'], 'lean layer')} aiming ever further ahead",
        f"{subtitle}\nHeld fixed: {numbers['parameters']:,} parameters, text, steps, seed. "
        f"Rate R aims layer i of the stack at h$_{{E+iR}}$.",
        rows=len(starts), columns=2, size=(12, 1.5 + 3.7 * len(starts)),
    )  # fmt: skip
    for row, (start, rates) in enumerate(starts.items()):
        cosine, agreement = axes[2 * row : 2 * row + 2]
        where = (
            "from the embedding (E = 0)" if start == "0" else f"from the state at layer E = {start}"
        )
        _series(cosine, rates, [
            ("target_cosine", "stack's end and its target", BLUE, "o", "-"),
            ("cosine", "stack's end and h$_N$", RED, "s", "-"),
            ("start_cosine", "h$_E$ and the target (no stack)", GREY, "x", "--"),
        ])  # fmt: skip
        _series(agreement, rates, [
            ("target_agreement", "stack's end with its target", BLUE, "o", "-"),
            ("agreement", "stack's end with the model", RED, "s", "-"),
            ("readout_agreement", "the same, linear map to h$_N$ first", GREEN, "^", "-"),
            ("state_agreement", "the target itself with the model", GREY, "x", "--"),
        ])  # fmt: skip
        label_panel(
            cosine, f"Cosine, {where}", "rate R, and the state aimed at", "cosine (held out)"
        )
        label_panel(
            agreement,
            f"Same next token, {where}",
            "rate R, and the state aimed at",
            "agreement (held out)",
        )
        for axis in (cosine, agreement):
            axis.set_ylim(-0.04, 1.02)  # cosines just below zero stay in sight
            ticks = [r["rate"] for r in rates]
            axis.set_xticks(ticks, [f"{r['rate']:g}\nh$_{{{r['targets'][-1]}}}$" for r in rates])
    for axis in axes[-2:]:  # one legend below each column
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), fontsize=9.5, ncols=2)
    return figure


def _series(axis: Axes, rates: Sequence[dict[str, Any]],
            lines: Sequence[tuple[str, str, str, str, str]]) -> None:  # fmt: skip
    x = [row["rate"] for row in rates]
    for key, label, colour, marker, line in lines:
        y = [row[key] for row in rates]
        axis.plot(x, y, color=colour, marker=marker, linestyle=line, label=label)


def _alignment(numbers: dict[str, Any], subtitle: str) -> Figure:
    figure, (cosine, agreement, price) = titled_figure(
        "What reaches the final state at every exit, and what it costs to train",
        subtitle, columns=3, size=(15.5, 5.2),
    )  # fmt: skip
    for name, (colour, marker) in _METHODS.items():
        rows = numbers["methods"][name]["exits"]
        depth = [row["depth"] for row in rows]
        for axis, key in ((cosine, "cosine"), (agreement, "agreement")):
            axis.plot(depth, [row[key] for row in rows], color=colour, marker=marker, label=name)
    if "accelerator" in numbers:
        rows = numbers["accelerator"]["exits"]
        for axis, key in ((cosine, "cosine"), (agreement, "agreement")):
            axis.plot([row["depth"] for row in rows], [row[key] for row in rows], color=RED,
                      marker="*", markersize=14, linestyle="none", label="trained accelerator",
                      zorder=6)  # fmt: skip
    for axis, what in ((cosine, "cosine with h$_N$"), (agreement, "same next token as the model")):
        label_panel(axis, what[0].upper() + what[1:], "depth: layers run one after another",
                    "mean over held-out positions")  # fmt: skip
        axis.set_ylim(-0.04, 1.02)
        axis.set_xlim(left=0)
        axis.set_xticks(sorted({0, *numbers["exits"]}))
    figure.legend(*cosine.get_legend_handles_labels(), loc="outside lower left", ncols=7)
    _bars(price, numbers["parameters"])
    return figure


def _bars(axis: Axes, rows: Sequence[dict[str, Any]]) -> None:
    ordered = sorted(rows, key=lambda row: row["parameters"], reverse=True)
    names = [row["name"] for row in ordered]
    values = [row["parameters"] for row in ordered]
    colours = [
        _METHODS[name][0] if name in _METHODS else RED if name == "accelerator"
        else "#BBBBBB" for name in names
    ]  # fmt: skip
    shown = [f"{name} (each exit)" if name in _METHODS else name for name in names]
    axis.barh(shown, values, color=colours)
    axis.set_xscale("log")
    axis.set_xlim(min(values) / 3, max(values) * 12)
    axis.grid(axis="y", visible=False)
    for place, value in enumerate(values):
        axis.text(value * 1.15, place, _short(value), va="center", fontsize=9)
    label_panel(axis, "Trained parameters", "parameters (log scale)", "")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))


def _ranks(numbers: dict[str, Any], subtitle: str) -> Figure:
    rows, targets = numbers["ranks"], numbers["targets"]
    figure, axes = titled_figure(
        f"Adapter rank: {_count(len(targets), 'lean layer')} from h$_{{{numbers['start']}}}$ to h$_N$",
        subtitle, size=(11, 4.9),
    )  # fmt: skip
    ranks = [row["rank"] for row in rows]
    for axis, key, what in (
        (axes[0], "cosine", "Cosine with h$_N$"),
        (axes[1], "agreement", "Same next token as the model"),
    ):
        for kind, label, colour, marker in (
            ("trained", "trained", BLUE, "o"), ("closed_form", "closed form only", ORANGE, "s"),
        ):  # fmt: skip
            values = [row[kind][key] for row in rows]
            axis.plot(ranks, values, color=colour, marker=marker, label=label)
        label_panel(axis, what, "adapter rank (parameters of the stack)", f"{key} (held out)")
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks, [f"{r['rank']}\n({_short(r['parameters'])})" for r in rows],
                        fontsize=9)  # fmt: skip
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
    axes[0].legend(loc="lower right")
    return figure


def _costs(numbers: dict[str, Any], subtitle: str) -> Figure:
    k, context = numbers["layers"], numbers["context"]
    figure, axes = titled_figure(
        f"Cost of a {k}-layer accelerated stream, a token",
        f"{subtitle.split(';')[0]}; lean layers of rank {numbers['lean_rank']}, {context:,} tokens of "
        f"context, {numbers['number_bytes']} bytes a number; LM head left out",
        rows=2, columns=3, size=(13.5, 8.2),
    )  # fmt: skip
    heads = [row["heads"] for row in numbers["heads"]]
    attended = [row["attended"] for row in numbers["attended"]]
    for place, (key, title, unit, scale) in enumerate((
        ("flops", "FLOPs", "MFLOP", 1e6), ("bytes", "Bytes read", "MB", 1e6),
        ("kv_bytes", "Keys and values read", "MB", 1e6),
    )):  # fmt: skip
        above, below = axes[place], axes[3 + place]
        y = [row[key] / scale for row in numbers["heads"]]
        above.plot(heads, y, color=BLUE, marker="o", label="lean")
        label_panel(above, f"{title} against heads kept", "query heads of a lean layer", unit)
        _whole_numbers(above)
        for kind, label, colour, marker in (
            ("scored", "lean, chosen by score", BLUE, "o"),
            ("known", "lean, choice known before", SKY, "s"),
        ):
            y = [row[kind][key] / scale for row in numbers["attended"]]
            below.plot(attended, y, color=colour, marker=marker, label=label)
        label_panel(
            below,
            f"{title} against attended tokens",
            f"tokens attended ({_count(numbers['attended_at_heads'], 'head')})",
            unit,
        )
        below.set_xscale("log", base=2)
        below.set_xticks(attended, [str(a) for a in attended])
        below.minorticks_off()
        for axis in (above, below):
            for name, label, colour, line in (
                ("tied", _count(k, "tied layer"), GREEN, "--"),
                ("slow_stream", "the slow stream, all layers", BLACK, ":"),
            ):
                axis.axhline(numbers[name][key] / scale, color=colour, linestyle=line, label=label)
            axis.set_yscale("log")
            _plain_log(axis, "y")
    handles = dict(zip(*reversed(axes[3].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    return figure


_DRAW = {
    "velocity": _velocity, "rates": _rates, "alignment": _alignment, "ranks": _ranks,
    "costs": _costs,
}  # fmt: skip


def _plain_log(axis: Axes, which: str) -> None:
    """Numbers as they are on a log axis, not powers of ten; 2 and 5 between them on a short one."""
    side = axis.yaxis if which == "y" else axis.xaxis
    low, high = side.get_view_interval()
    few = high / max(low, 1e-300) < 40

    def between(value: float, _: int | None) -> str:
        return f"{value:.3g}" if few and f"{value:.0e}"[0] in "25" else ""

    side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    side.set_minor_formatter(FuncFormatter(between))


def _short(value: float) -> str:
    """12_345_678 as 12M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            digits = 1 if value < 10 * size else 0
            return f"{value / size:.{digits}f}{letter}"
    return f"{value:.0f}"

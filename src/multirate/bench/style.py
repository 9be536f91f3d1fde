"""How every figure looks.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; markers and labels repeat them.
"""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PINK, GREY = "#0072B2", "#D55E00", "#CC79A7", "#7F7F7F"

STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "svg.hashsalt": "multirate",
    "svg.fonttype": "none",
}


def titled_figure(
    title: str,
    subtitle: str,
    *,
    rows: int = 1,
    columns: int = 2,
    size: tuple[float, float] = (11, 4.8),
) -> tuple[Figure, list[Axes]]:
    """Panels below a title and a subtitle of one line or more."""
    width, height = size
    top = 0.5 + 0.2 * len(subtitle.splitlines())  # inches
    figure = Figure(figsize=size)
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - top / height))
    axes = figure.subplots(rows, columns, squeeze=False)
    left = 0.12 / width
    figure.text(left, 1 - 0.12 / height, title, va="top", fontsize=13, fontweight="bold")
    figure.text(left, 1 - 0.42 / height, subtitle, va="top", fontsize=9.5, color="#444444")
    return figure, list(axes.flat)


def label_panel(axis: Axes, title: str, x: str, y: str) -> None:
    """Name a panel and its axes."""
    axis.set_title(title)
    axis.set_xlabel(x)
    axis.set_ylabel(y)

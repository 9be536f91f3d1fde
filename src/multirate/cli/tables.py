"""The tables that `multirate bench` prints, and what their numbers mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from multirate.bench.cost_card import CostCard
    from multirate.bench.reports import ReportComparison
    from multirate.bench.speculative import SpeculativeReport
    from multirate.bench.summary import CategorySummary, MethodSummary


def show(report: SpeculativeReport, console: Console) -> None:
    """Print a report as a table, with what its numbers mean."""
    from multirate.bench.summary import FEWEST

    source = report.provenance
    machine = source["machine"]
    calls = "prompts" if source["batch"] == 1 else "batches"
    table = Table(
        title=f"{source['model']}, {source['dtype']}, {_decoding(source)}, "
        f"{report.prompts} prompts x {report.new_tokens} new tokens",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,  # all columns fit in 80 characters
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("method", no_wrap=True)
    for column in (
        "tokens/s", "vs plain", "vs trans-\nformers", "accept.\nlength",
        "identical/\nnear-ties/\ndifferent",
    ):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    for name, summary in report.methods.items():
        table.add_row(name, *_cells(summary))
    console.print(table)
    console.print()
    if report.categories is not None:
        console.print(_by_category(report.categories))
        console.print()
    for name, summary in report.methods.items():
        for line in _drafting(name, summary):
            console.print(line, soft_wrap=True)
    console.print(
        f"tokens/s of whole calls, prefill included: median over {calls} (10th-90th percentile); "
        f"speedups: median of the ratios on single {calls} (95% confidence interval); "
        "acceptance length: tokens a draft step yields.",
        soft_wrap=True,
    )
    groups = [report.methods, *(group.methods for group in (report.categories or {}).values())]
    if any(summary.few for methods in groups for summary in methods.values()):
        console.print(
            f"Fewer than {FEWEST} {calls} say nothing of others: a dash stands for the interval.",
            soft_wrap=True,
        )
    if any(summary.identical is not None for summary in report.methods.values()):
        console.print(
            f"Outputs are compared with plain's where the weights are the same; a near-tie is a first "
            f"difference with log-probabilities within {source['near_tie_tolerance']:.2g}.",
            soft_wrap=True,
        )
    for name, own in source.get("own_dtypes", {}).items():
        console.print(
            f"{name} runs in {own['dtype']}: near-ties within {own['near_tie_tolerance']:.2g}",
            soft_wrap=True,
        )
    console.print(_costs(report.cost_card), soft_wrap=True)
    console.print(
        f"{machine['cpu']}, {machine['usable_cores']} cores, {source['torch_threads']} threads, "
        f"device {machine['device']}",
        soft_wrap=True,
    )


def _costs(card: CostCard) -> str:
    """The cost card in two sentences."""
    return (
        f"plain step: {card.weight_bytes / 1e6:.0f} MB of weights, "
        f"{card.kv_bytes_per_token / 1e3:.1f} kB of keys and values a token; memory "
        f"{card.bandwidth / 1e9:.1f} GB/s, matmul {card.matmul_rate / 1e9:.0f} GFLOPS. Reading takes "
        f"{1e3 * card.floor_seconds:.1f} ms, multiplying {1e3 * card.matmul_seconds:.1f} ms, the step "
        f"{1e3 * card.step_seconds:.1f} ms ({card.rows} x {card.context} tokens): roofline fraction "
        f"{card.roofline_fraction:.2f}"
    )


def _decoding(source: Mapping[str, Any]) -> str:
    """In a few words; seeds and the usual, one prompt at a time, are not among them."""
    words = source["decoding"].split(", ")
    return ", ".join(w for w in words if not w.startswith("seed") and w != "one prompt at a time")


def _cells(summary: MethodSummary) -> list[str]:
    speed = summary.tokens_per_second
    counts = (summary.identical, summary.near_ties, summary.differences)
    return [
        f"{speed.median:.1f}\n" + ("-" if summary.few else f"({speed.low:.1f}-{speed.high:.1f})"),
        _speedup(summary, before="\n"),
        _times(summary.speedup_vs_transformers),
        _length(summary),
        "-" if summary.identical is None else " / ".join(map(str, counts)),
    ]


def _by_category(categories: Mapping[str, CategorySummary]) -> Table:
    """Speed-up and acceptance of every method but plain, a block of lines a category."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("category")
    table.add_column("prompts", justify="right")
    table.add_column("method", no_wrap=True)
    table.add_column("vs plain", justify="right", no_wrap=True)
    table.add_column("accept.\nlength", justify="right", no_wrap=True)
    for category, group in categories.items():
        first = (category, str(group.prompts))
        for name, summary in group.methods.items():
            if name == "plain":
                continue
            table.add_row(*first, name, _speedup(summary, before=" "), _length(summary))
            first = ("", "")
        table.add_section()
    return table


def _length(summary: MethodSummary) -> str:
    speculation = summary.speculation
    return "-" if speculation is None else f"{speculation.mean_acceptance_length:.2f}"


def _drafting(name: str, summary: MethodSummary) -> Iterator[str]:
    """What a table has no room for: acceptance by position, and how much was drafted."""
    speculation = summary.speculation
    if speculation is None:
        return
    if speculation.num_drafts > 0:
        rates = ", ".join(f"{rate:.2f}" for rate in speculation.per_position_acceptance_rate)
        drafted = speculation.num_draft_tokens / speculation.num_drafts
        yield (
            f"{name}: {drafted:.1f} tokens a draft; share of drafts accepted up to position 1, 2, "
            f"...: {rates}"
        )
    if speculation.note is not None:
        yield f"{name}: {speculation.note}"


def _speedup(summary: MethodSummary, *, before: str) -> str:
    """Over plain decoding, with its interval, or a dash where prompts are too few for one."""
    if summary.speedup_vs_plain is None:
        return "-"
    interval = summary.speedup_vs_plain_ci
    shown = "-" if interval is None else f"({interval[0]:.2f}-{interval[1]:.2f})"
    return f"{_times(summary.speedup_vs_plain)}{before}{shown}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def side_by_side(found: ReportComparison, *, title: str) -> Table:
    """Two reports' speeds, a line a method."""
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    table.add_column("method", no_wrap=True)
    for column in ("tokens/s\nA", "\nB", "\nB/A", "vs plain\nA", "\nB", "\nB/A"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, pair in found.methods.items():
        speed, speedup = pair.tokens_per_second, pair.speedup_vs_plain
        table.add_row(
            name,
            f"{speed.a:.1f}", f"{speed.b:.1f}", _times(speed.ratio),
            _times(speedup.a), _times(speedup.b), _times(speedup.ratio),
        )  # fmt: skip
    return table

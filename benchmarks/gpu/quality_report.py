"""Tables and plots of the quality benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from report import Row

from kvcm.gpu_tier.eval.hit_rates import HitRate
from kvcm.gpu_tier.eval.report import Cell, ResultTable, claims_table, plot_lines, write
from kvcm.gpu_tier.eval.synth import Regime

if TYPE_CHECKING:
    from equal_budgets import Measured

__all__ = ["publish_report", "quality_plot", "quality_table", "recall_table"]

_QUALITY_NOTE = {
    "tokens": "S1, means over the seeds. Every method may select the same number of tokens per step and KV head. "
    "Representation: bytes it chooses by, over those of the KV in bf16 (the oracle, a ceiling, reads all keys). "
    "p95: of norm_err over the steps, of the worst head.",
    "bytes": "S1, means over the seeds. Representation and selected KV together may take this share of the KV's bytes; "
    "– where the representation alone takes it. Figures of a layer with one KV head: the index keys of dsa, here its "
    "stand-in, cost 132 B per token and layer, which is a quarter of one MHA head's KV, but 11 % of a DeepSeek latent.",
}


def publish_report(
    folder: Path, measured: Sequence[Measured], rates: dict[str, list[HitRate]], rows: Sequence[Row]
) -> None:
    """Write report.md, report.json and two plots."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = [
        claims_table(_figures(rows)),
        *(quality_table(measured, budget) for budget in ("tokens", "bytes")),
        _cache_table(rates),
        recall_table(rows),
    ]
    _plots(folder, measured, rates)
    write("Quality of selections", tables, folder, ("quality.svg", "hit_rate.svg"))


def quality_table(measured: Sequence[Measured], budget: str, note: str = "") -> ResultTable:
    """Return the table of all methods under one kind of budget, "tokens" or "bytes", with a note of its own if any."""
    columns = (
        "regime", f"share of {budget}", "method", "tokens", "representation", "recall@100", "worst seed",
        "mass recall", "norm_err", "p95 of it", "rel_err", "cosine",
    )  # fmt: skip
    rows = []
    for m in (m for m in measured if m.budget == budget):
        head = (m.regime.value, m.share, m.name)
        if not m.results:
            rows.append((*head, *(None,) * 9))
            continue
        kv = m.results[0].kv_bytes / m.results[0].tokens * m.context_tokens
        figures = (round(m.mean("tokens")), m.mean("representation_bytes") / kv)
        names = ("recall", "mass", "normalised", "p95", "relative", "cosine")
        recall, *others = (m.mean(name) for name in names)
        rows.append((*head, *figures, recall, min(r.recall for r in m.results), *others))
    return ResultTable(f"Equal {budget}", columns, tuple(rows), note or _QUALITY_NOTE[budget])


def _cache_table(rates: dict[str, list[HitRate]]) -> ResultTable:
    rows = [
        (case, rate.selected, rate.capacity, rate.ratio, rate.rate) for case, found in rates.items() for rate in found
    ]
    note = "LRU diff buffer, first 10 steps left out. C3: without returns a larger buffer gains nothing."
    return ResultTable("Hit rates", ("trace", "selected", "buffer", "ratio", "hit rate"), tuple(rows), note)


def recall_table(rows: Sequence[Row], note: str = "") -> ResultTable:
    """Return the table of the recall transformer's rows, with a note of its own if any."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.case.startswith("recall "):
            found.setdefault(row.case, {})[row.metric.partition(",")[0]] = row
    cells = tuple(_recall_cells(case, by_metric) for case, by_metric in found.items() if "accuracy" in by_metric)
    note = note or (
        "At least 600 questions a line, the same for all methods of a table, decoded through the whole engine after an "
        "exact prefill; dsa is its stand-in. Shares are of the tokens, or of the KV bytes, representation included. "
        "Needles are one per four tokens with random neighbours: the worst case for methods that choose "
        "pages. Attention errors are over both layers; the second starts from what the first got wrong. Hit rates are "
        "of a buffer of twice the selection and count the cold start."
    )
    columns = ("case", "accuracy", "of full attention", "attention rel_err", "hit rate")
    return ResultTable("Recall transformer", columns, cells, note)


def _recall_cells(case: str, by_metric: dict[str, Row]) -> tuple[Cell, ...]:
    accuracy = by_metric["accuracy"]
    others = (by_metric.get(metric) for metric in ("attention rel_err", "hit rate"))
    return case, accuracy.value, accuracy.baseline, *(row.value if row else None for row in others)


def _plots(folder: Path, measured: Sequence[Measured], rates: dict[str, list[HitRate]]) -> None:
    quality_plot(measured, folder / "quality.svg")
    lines = {case: [(rate.ratio, rate.rate) for rate in found] for case, found in rates.items()}
    plot_lines({"LRU diff buffer": lines}, "buffer / selection", "hit rate", folder / "hit_rate.svg")


def quality_plot(measured: Sequence[Measured], path: Path) -> None:
    """Draw recall over the share of tokens selected."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {regime.value: {} for regime in Regime}
    for m in (m for m in measured if m.budget == "tokens"):
        panels[m.regime.value].setdefault(_legend(m.name), []).append((100 * m.share, m.mean("recall")))
    plot_lines(panels, "tokens selected, %", "recall@100", path, log_x=True)


def _legend(method: str) -> str:
    """Return the name of a method's line: S1 has no indexer, so dsa is its stand-in there."""
    return "dsa stand-in" if method == "dsa" else method


def _figures(rows: Sequence[Row]) -> dict[str, str]:
    """Return our figure of each claim."""
    value = {(row.case, row.metric): row.value for row in rows}

    def several(metric: str, *cases: str) -> str:
        return ", ".join(f"{value[case, metric]:.2f}" for case in cases if (case, metric) in value)

    regimes = [f"S1 {regime}" for regime in Regime]
    hits = [several(f"hit rate, buffer {ratio}x", "C1 mid") for ratio in (1, 2, 4)]
    figures = {
        "step_overlap": several("top-100 overlap of steps", *regimes),
        "hit_rate": ", ".join(hits),
        "buffer_ratio": several("hit rate, buffer 4x", "C2 half return", "C3 none return"),
        "quest_quality": several("recall@100", *(f"Q12 quest 20%, {regime}" for regime in Regime)),
        "streaming_quality": several("accuracy", "recall 2K, streaming_llm 10.0%"),
        "snapkv_question": several(
            "accuracy", "recall 1K, questions first, snapkv 10.0%", "recall 1K, questions last, snapkv 10.0%"
        ),
    }
    return {key: figure for key, figure in figures.items() if figure}

"""Reports: tables of results as Markdown and JSON, the claims of the published systems beside them, and plots."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvcm.gpu_tier.errors import ConfigError

__all__ = [
    "CLAIMS",
    "RETRIEVAL_CLAIMS",
    "Cell",
    "Claim",
    "ResultTable",
    "Status",
    "claims_table",
    "left_out_table",
    "plot_lines",
    "write",
]

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class ResultTable:
    """One table.

    Attributes:
        title: what it shows.
        columns: their names, with units.
        rows: cells; None where there is no figure.
        note: how it was measured, and what it does not say.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ConfigError("rows", row, f"must have the {len(self.columns)} columns {', '.join(self.columns)}")

    def markdown(self) -> str:
        """Return the table with its title and its note."""
        lines = [f"## {self.title}", ""]
        if self.note:
            lines += [self.note, ""]
        lines += [_line(self.columns), _line("---" for _ in self.columns)]
        lines += [_line(map(_text, row)) for row in self.rows]
        return "\n".join([*lines, ""])


def write(title: str, tables: Sequence[ResultTable], folder: Path, plots: Sequence[str] = ()) -> None:
    """Write `report.md` and `report.json` into a folder, which is made if need be.

    Args:
        title: of the report.
        tables: in the order in which they are to be read.
        folder: where to.
        plots: files in the folder that the report shows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [f"# {title}\n", *(f"![{Path(plot).stem}]({plot})\n" for plot in plots), *(t.markdown() for t in tables)]
    (folder / "report.md").write_text("\n".join(pieces))
    document = {"title": title, "tables": [asdict(table) for table in tables]}
    (folder / "report.json").write_text(json.dumps(document, indent=1) + "\n")


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell).replace("|", "\\|")


# What the published systems claim, and what can be said of it without their models, data and machines.


class Status(StrEnum):
    """How far a claim can be checked here."""

    REPRODUCED = "R"
    PROXY = "P"
    NOT_POSSIBLE = "N"


@dataclass(frozen=True, slots=True)
class Claim:
    """One published figure.

    A claim is *reproduced* when the same quantity is measured on the same kind of thing, a *proxy* when it is measured
    on synthetic keys, on the recall transformer or on some of a model's layers, and *not possible* otherwise. A proxy
    shows that the mechanism behaves as claimed; it is never quoted as the claim's own number.

    Attributes:
        key: name under which our figure is handed in.
        source: the publication.
        claim: the figure.
        conditions: under which it was measured.
        status: how far it can be checked here.
        ours: where our side comes from, or why there is none.
    """

    key: str
    source: str
    claim: str
    conditions: str
    status: Status
    ours: str


_SGLANG = "SGLang, hierarchical sparse attention"
_PQ = "PQCache, SIGMOD 2025"
_R, _P, _N = Status.REPRODUCED, Status.PROXY, Status.NOT_POSSIBLE
CLAIMS = (
    Claim(
        key="step_overlap",
        source=_SGLANG,
        claim="adjacent steps share 80–90 % of the top k",
        conditions="DeepSeek-V3.2, k=2048",
        status=_P,
        ours="S1, top 100 of 32K tokens: sharp, mid, diffuse",
    ),
    Claim(
        key="hit_rate",
        source=_SGLANG,
        claim="hit rate of at least 80 % with a buffer of 4K–8K tokens, clearly lower at 2K",
        conditions="DeepSeek-V3.2, k=2048",
        status=_P,
        ours="S1 mid, exact top 512, buffer of 1, 2 and 4 times that",
    ),
    Claim(
        key="buffer_ratio",
        source=_SGLANG,
        claim="a buffer of 2–4 times the top k",
        conditions="the same",
        status=_P,
        ours="4 times, half of what left returns, and none: a larger buffer gains only what returns",
    ),
    Claim(
        key="io_bandwidth",
        source=_SGLANG,
        claim="about 40 GB/s per GPU in the IO kernel",
        conditions="8×H20, PCIe, NUMA bound",
        status=_R,
        ours="benchmarks/gpu/k1_io_transfer.py",
    ),
    Claim(
        key="device_memory",
        source=_SGLANG,
        claim="8 GB of latents per request move to the host; memory grows with k, not n",
        conditions="128K tokens, 61 layers",
        status=_R,
        ours="the plan command; index keys of 1.06 GB stay on the GPU and are counted",
    ),
    Claim(
        key="quest_bytes",
        source=_SGLANG,
        claim="Quest's representation is about 1 % of the keys",
        conditions="page size not given",
        status=_N,
        ours="minimum and maximum are 2/page of the keys: 3.1 % at 64 tokens, 12.5 % at 16",
    ),
    Claim(
        key="throughput",
        source=_SGLANG,
        claim="more tokens/s at 16K, 32K and 64K input as batches grow",
        conditions="DeepSeek-V3.2, 8×H200, 1 TB host",
        status=_P,
        ours="benchmarks/gpu K6: some of the layers, extrapolated",
    ),
    Claim(
        key="low_batch",
        source="SGLang, later threads",
        claim="slower at batch 1–4 (0.92–0.94×), 3.0× at batch 54",
        conditions="8×RTX PRO 6000",
        status=_P,
        ours="K6 prints the losing points too",
    ),
    Claim(
        key="quest_quality",
        source="Quest, ICML 2024",
        claim="full accuracy at a small page budget",
        conditions="LLaMA-class models",
        status=_P,
        ours="S1 needs 20 % of the tokens: importance is scattered over single tokens there",
    ),
    Claim(
        key="streaming_quality",
        source="StreamingLLM, ICLR 2024",
        claim="stable language modelling; not a claim about recall",
        conditions="sinks and window",
        status=_P,
        ours="recall task at 10 %: what is outside the window is lost",
    ),
    Claim(
        key="snapkv_question",
        source=_PQ,
        claim="+7.10 % over the best baseline when the question comes first",
        conditions="LongBench, Llama-3.1-8B",
        status=_P,
        ours="recall task: SnapKV at 10 %, questions first, and last, in the prompt",
    ),
)


def claims_table(figures: Mapping[str, str], claims: Sequence[Claim] = CLAIMS) -> ResultTable:
    """Return the table of claims.

    Args:
        figures: our figure of each claim that there is one of, by key.
        claims: that the table lists.
    """
    rows = tuple((c.source, c.claim, c.conditions, c.status.value, figures.get(c.key), c.ours) for c in claims)
    return ResultTable(
        title="Published claims",
        columns=("source", "claim", "conditions", "status", "ours", "from"),
        rows=rows,
        note="R reproduced in kind, P proxy only, N not possible without their models, data or machines.",
    )


# What RetroInfer and PQCache claim, and the systems that they compare themselves with and that are not here.

_RETRO = "RetroInfer, PVLDB 19(5)"
_LLAMA = "Llama3-8B-1048K, A100-80GB, PCIe4, 1.7 TB host"
_GPU = "a figure needs a GPU"
_RETRO_CLAIMS = (
    Claim(
        key="retro_throughput",
        source=_RETRO,
        claim="4.1/4.4/4.4× decode throughput over full attention at 30/60/120K",
        conditions=f"{_LLAMA}, largest batch each",
        status=_P,
        ours="roofline: 25 requests of 120K against 7, nothing overlapped to all; measured by K4, on a GPU",
    ),
    Claim(
        key="retro_sparse",
        source=_RETRO,
        claim="3.3–22.8× over sparse systems; at 1M tokens 10.5× MagicPIG, 12.2× PQCache",
        conditions=_LLAMA,
        status=_P,
        ours=f"K5, against our own PQCache at a million tokens; {_GPU}",
    ),
    Claim(
        key="retro_tasks",
        source=_RETRO,
        claim="3.4–4.6× across tasks, 2.6–3.5× over Quest, 2.4–24.4× on four models",
        conditions=_LLAMA,
        status=_N,
        ours="depends on the hit rates of tasks that cannot be run here",
    ),
    Claim(
        key="retro_end_to_end",
        source=_RETRO,
        claim="2.2–3.3× over vLLM; long input 1.8–7.8×, with XAttention 2.1–10.5×; long output 2.7–70.8×",
        conditions=_LLAMA,
        status=_N,
        ours="no serving system with real models here",
    ),
    Claim(
        key="retro_prefill",
        source=_RETRO,
        claim="prefill +6 % (120K), +3 % (1M); clustering below 5 %, offload +0.4 %",
        conditions="A100",
        status=_R,
        ours=f"K8, clustering against the prefill of a layer; {_GPU}",
    ),
    Claim(
        key="retro_accuracy",
        source=_RETRO,
        claim="RULER at 128K loses 0.66/1.50/1.97/0.73 points; needles found up to 1M; AIME24 "
        "76.7 of 73.3, GPQA 68 of 68; −1.52 % with sparse prefill",
        conditions="four models",
        status=_P,
        ours="recall transformer instead, wave 1.8 % + 23.2 % against full attention, same questions: 2K, 4K",
    ),
    Claim(
        key="retro_hit_rate",
        source=_RETRO,
        claim="hit rate 0.79–0.94 with a cache of 5 %",
        conditions="tasks",
        status=_P,
        ours="S1 mid, 32K tokens, clusters selected, caches of 2.5, 5 and 10 %",
    ),
    Claim(
        key="retro_traffic",
        source=_RETRO,
        claim="PCIe traffic below 2 % of what full attention reads",
        conditions="1.8 % retrieved",
        status=_R,
        ours="S1 mid: bytes from the host that the wave buffer counted in a step, over the KV's; cache of 5 %",
    ),
    Claim(
        key="retro_overlap",
        source=_RETRO,
        claim="31 % of the top 100 are shared by three steps",
        conditions="Llama3-8B",
        status=_P,
        ours="S1 sharp, mid, diffuse: in the top 100 of three steps in a row",
    ),
    Claim(
        key="retro_sparsity",
        source=_RETRO,
        claim="sparsity above 98 % hides the link (60:1)",
        conditions="A100, PCIe4",
        status=_P,
        ours="the same arithmetic at 4.3 TB/s and 55 GB/s",
    ),
    Claim(
        key="retro_copy",
        source=_RETRO,
        claim="copies of a layer 1.3 ms → 100 µs; a naive cache +1.5 ms; a layer takes 720 µs",
        conditions="A100, 128K",
        status=_R,
        ours=f"K10; {_GPU}",
    ),
    Claim(
        key="retro_segments",
        source=_RETRO,
        claim="8K segments: less than 1 % of recall lost, build time −80 %",
        conditions="128K, layer 10",
        status=_R,
        ours="benchmarks/gpu/index_build.py, 8K segments against one: time, recall@100 sharp, mid, diffuse",
    ),
    Claim(
        key="retro_update",
        source=_RETRO,
        claim="index updates take 0.2 % of decode",
        conditions="A100",
        status=_R,
        ours=f"K4, half an update segment decoded; {_GPU}",
    ),
    Claim(
        key="retro_estimation",
        source=_RETRO,
        claim="estimation gains up to 20 % of accuracy",
        conditions="RULER",
        status=_P,
        ours="relative error without over with estimation: S1 sharp, mid, diffuse",
    ),
    Claim(
        key="retro_batch",
        source=_RETRO,
        claim="full attention: at most 4 requests of 128K, 512K tokens of context",
        conditions="A100-80GB",
        status=_R,
        ours="plan: requests of 128K in 80 GB beside 16 GB of weights; longest single request",
    ),
)
_PQ_CLAIMS = (
    Claim(
        key="pq_baselines",
        source=_PQ,
        claim="InfiniteBench +4.60 % (1/10), +1.50 % (1/5), LongBench +3.90 %, +1.74 % over the best baseline",
        conditions="Llama-3.1-8B",
        status=_N,
        ours="no models and no data here",
    ),
    Claim(
        key="pq_oracle",
        source=_PQ,
        claim="LongBench: full 47.37, oracle 47.40, PQ 47.29 (1/5), 47.19 (1/10); InfiniteBench 47.63, "
        "47.31, 46.80; within 0.70 % and 1.71 % of the oracle",
        conditions="Llama-3.1-8B",
        status=_P,
        ours="recall transformer, 4K, m4b8 at 10 % and the oracle at 10 %",
    ),
    Claim(
        key="pq_question",
        source=_PQ,
        claim="+7.10 % over the best baseline when the question comes first",
        conditions="LongBench",
        status=_P,
        ours="recall transformer, questions first, m4b8 at 10 % of tokens; SnapKV: report of the other methods",
    ),
    Claim(
        key="pq_cache",
        source=_PQ,
        claim="TPOT −26.3 % / −32.8 % with a cache of 4K / 8K tokens; hit rates about 0.5 and 0.6",
        conditions="RTX 4090, PCIe 1.0 x16, 1/5 of the tokens, k_cache=32",
        status=_P,
        ours=f"S1 mid, 32K tokens, 1/5 of the tokens: hit rates with 4K and 8K tokens; for times {_GPU}",
    ),
    Claim(
        key="pq_traffic",
        source=_PQ,
        claim="extra traffic at most 1/128 (m2b6) or 1/64 (m4b8) of the keys' bytes",
        conditions="d=128",
        status=_R,
        ours="bytes of codes over bytes of bf16 keys: m2b6 and m4b8, a byte for each code",
    ),
    Claim(
        key="pq_latency",
        source=_PQ,
        claim="time per token nearly flat in n; clustering hidden behind prefill; second token soonest",
        conditions="2×Xeon 6330, 48 threads",
        status=_P,
        ours=f"with few cores the least number of iterations binds; {_GPU}",
    ),
    Claim(
        key="pq_70b",
        source=_PQ,
        claim="70B: 52.89 full, 52.88/52.86; with MInference 47.31 → 40.18 (MInference alone 41.04)",
        conditions="Llama-3.1-70B",
        status=_N,
        ours="no models here",
    ),
)
RETRIEVAL_CLAIMS = (*_RETRO_CLAIMS, *_PQ_CLAIMS)
_LEFT_OUT = (
    ("MagicPIG", "RetroInfer", "samples by locality-sensitive hashing on the CPU, which also attends there: another "
     "system, not a policy of this one"),
    ("vLLM", "RetroInfer", "a serving system; full attention in the same framework is the baseline here"),
    ("XAttention, MInference", "RetroInfer, PQCache", "sparse prefill; prefill is exact here"),
    ("PQCache", "RetroInfer", "here: compared in the same framework"),
    ("Quest, SnapKV, StreamingLLM", "both", "here: in the quality report of the other methods"),
    ("other baselines of the papers' tables", "both", "not built: the papers' figures need their models and data"),
)  # fmt: skip


def left_out_table() -> ResultTable:
    """Return what the two systems are compared with by their authors, and whether it is here."""
    return ResultTable("Baselines of the papers", ("system", "compared by", "here"), _LEFT_OUT)


# Plots of the quality report. Needs matplotlib, which only reports do.

_COLORS = {
    "oracle": "#212529", "quest": "#0b7285", "dsa": "#e8590c", "snapkv": "#5f3dc4", "streaming_llm": "#868e96",
    "wave": "#0b7285", "wave, no estimation": "#74c0fc", "pq m4b8": "#5f3dc4", "pq m2b6": "#e8590c",
    "dsa stand-in": "#e8590c", "sharp": "#0b7285", "mid": "#e8590c", "diffuse": "#5f3dc4",
}  # fmt: skip
_FAINT = "#dee2e6"
Line = Sequence[tuple[float, float]]


def plot_lines(
    panels: Mapping[str, Mapping[str, Line]], x_label: str, y_label: str, path: Path, *, log_x: bool = False
) -> None:
    """Draw one panel of lines per entry, side by side with one scale, as SVG.

    Args:
        panels: title of each panel → name of each line → its points.
        x_label: of all panels.
        y_label: of the first.
        path: file to write.
        log_x: whether x is logarithmic.
    """
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    with mpl.rc_context({"svg.hashsalt": "kvcm", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure, axes = pyplot.subplots(
            1, len(panels), figsize=(3.6 * len(panels), 3.2), sharey=True, squeeze=False, layout="constrained"
        )
        for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
            _draw(axis, title, lines, log_x=log_x)
            axis.set_xlabel(x_label)
        axes[0][0].set_ylabel(y_label)
        axes[0][-1].legend(frameon=False, fontsize=8)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)


def _draw(axis: Any, title: str, lines: Mapping[str, Line], *, log_x: bool) -> None:
    for name, points in lines.items():
        x, y = zip(*sorted(points), strict=True)
        axis.plot(x, y, marker="o", markersize=3, label=name, color=_COLORS.get(name))
    if log_x:
        _log_ticks(axis, sorted({x for points in lines.values() for x, _ in points}))
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axis.grid(color=_FAINT)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _log_ticks(axis: Any, values: Sequence[float]) -> None:
    """Mark the measured values themselves: powers of ten say little between 2 and 20 %."""
    axis.set_xscale("log")
    axis.set_xticks(values, [f"{value:g}" for value in values])
    axis.set_xticks([], minor=True)

"""The answer in a few sentences: what to set, what it gives, and what to doubt."""

from __future__ import annotations

from collections.abc import Iterator

from kvcm.optimizer.report import amounts
from kvcm.optimizer.report.markup import Markup, tag
from kvcm.optimizer.study import BOUND, Recommendation, Study

__all__ = ["summary"]


def summary(study: Study, key: str) -> Markup:
    """Return the summary of one trace."""
    found = study.recommendation
    if found is None:
        answer, tiles = "Only the bound was asked for, which is no policy that can be set.", Markup()
    elif not found.pays:
        answer, tiles = _nothing(study, found), Markup()
    else:
        answer, tiles = _answer(study, found), _tiles(study, found)
    doubts = list(_doubts(study))
    listed = tag("ul", *(tag("li", doubt) for doubt in doubts)) if doubts else Markup()
    return tag("div", tag("p", answer), tiles, listed, class_="summary", id=key)


def _answer(study: Study, found: Recommendation) -> str:
    row = found.returns.row(found.place)
    best = found.returns.row(found.returns.best)
    text = (
        f"Take {found.policy} with {amounts.count(found.capacity_blocks)} blocks"
        f" ({amounts.size(found.capacity_blocks * study.bytes_per_block)}): it finds "
        f"{amounts.percent(row['hit_share'])} of the prompt tokens. That saves "
        f"{row['gpus_saved']:,.1f} GPUs, worth {amounts.money(row['net_per_hour'], 2)} per hour after the storage "
        "is paid."
    )
    if best["capacity_blocks"] > row["capacity_blocks"]:
        text += (
            f" The very best would be {amounts.count(best['capacity_blocks'])} blocks, for "
            f"{amounts.money(best['net_per_hour'] - row['net_per_hour'], 2)} per hour more."
        )
    return text


def _nothing(study: Study, found: Recommendation) -> str:
    where = (
        "nothing is used again" if not study.unlimited.hits.prefix_blocks else "the hits are worth less than they cost"
    )
    return f"No cache pays for itself on this trace in this deployment: {where}. {found.policy} was the least bad."


def _tiles(study: Study, found: Recommendation) -> Markup:
    row = found.returns.row(found.place)
    tiles = {
        "policy": found.policy,
        "capacity": amounts.size(found.capacity_blocks * study.bytes_per_block),
        "of prompt tokens found": amounts.percent(row["hit_share"]),
        "GPUs saved": f"{row['gpus_saved']:,.1f} of {found.returns.nodes_without * _gpus(study):,.1f}",
        "net value per hour": amounts.money(row["net_per_hour"], 2),
    }
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in tiles.items()), class_="tiles")


def _gpus(study: Study) -> float:
    return study.options.deployment.gpus_per_node


def _doubts(study: Study) -> Iterator[str]:
    found = study.recommendation
    if found is not None and found.pays:
        yield from _doubts_of_setting(study, found)
    for sentence in study.trace.assumed:
        yield f"{sentence}."
    if study.trace.bad_line_count:
        yield f"{study.trace.bad_line_count:,} bad lines were left out."
    yield (
        "GPUs and money rest on the deployment's figures, which are assumptions until they are replaced by your own; "
        "what lies in the cache at other hours than the recorded ones is not known."
    )


def _doubts_of_setting(study: Study, found: Recommendation) -> Iterator[str]:
    capacity = found.capacity_blocks
    if BOUND in study.curves:
        # The bound is one of blocks: which tokens a policy would find with as many is not said.
        bound, own = study.curves[BOUND].at(capacity).block_hit_rate, study.over_time[0].block_hit_rate
        yield (
            f"No policy could find more than {amounts.percent(bound)} of the blocks at this capacity; this one finds "
            f"{amounts.percent(own)}, so at most {100 * max(0.0, bound - own):.1f} points are left for better eviction."
        )
    if capacity >= study.trace.unique_blocks:
        yield (
            "The recommended capacity holds everything in this trace: it is too short to say where more stops helping. "
            "Record a longer one before buying."
        )
    saturated = found.returns.saturated
    if saturated is not None and saturated <= found.place:
        yield (
            "The link to the cache is saturated: more hits than "
            f"{amounts.percent(found.returns.turning_share)} of the tokens cannot be loaded in time, and add nothing."
        )

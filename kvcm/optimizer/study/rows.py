"""Policies at capacities: replayed, or read from a one-pass curve where that is the same for less."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvcm.optimizer.capacities import parse_capacities
from kvcm.optimizer.curves import CURVES
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.replay import Job, replay_all
from kvcm.optimizer.results import Curve, Replay
from kvcm.optimizer.study.grouped import grouped_rows
from kvcm.optimizer.study.options import Progress, StudyOptions
from kvcm.optimizer.trace import Trace

__all__ = ["all_curves", "replays_of", "rows_of"]


def replays_of(trace: Trace, options: StudyOptions, progress: Progress) -> tuple[Replay, ...]:
    """Return what each policy counts at each capacity, policies first.

    Raises:
        OptionError: a policy or capacity is none, or cannot be replayed on this trace.
    """
    capacities = parse_capacities(options.capacities, trace.unique_blocks)
    if not trace.is_plain:
        return grouped_rows(trace, options, capacities, progress)
    labels = [spec.label for spec in options.policies if spec.label in CURVES]
    # One pass costs more than one replay, and holds block by block.
    is_worth_it = options.mode == "block" and len(capacities) > 1
    curves = all_curves(trace, labels if is_worth_it else (), progress)
    return rows_of(trace, options, capacities, curves, progress)


def all_curves(trace: Trace, labels: Iterable[str], progress: Progress) -> dict[str, Curve]:
    """Return the curves of policies, of those whose curve one pass tells for this trace."""
    wanted, found = tuple(labels), {}
    for done, label in enumerate(wanted):
        progress("curves", done, len(wanted))
        try:
            found[label] = CURVES[label](trace)
        except OptionError:  # a replay tells it
            continue
    progress("curves", len(wanted), len(wanted))
    return found


def rows_of(
    trace: Trace,
    options: StudyOptions,
    capacities: Sequence[int],
    curves: Mapping[str, Curve],
    progress: Progress,
    *,
    keep_requests: bool = False,
) -> tuple[Replay, ...]:
    """Return what each policy counts at each capacity; those that have a curve are not replayed.

    Raises:
        OptionError: a policy cannot be replayed on this trace.
    """
    replayed = [spec for spec in options.policies if spec.label not in curves]
    jobs = [Job(spec, capacity, options.mode, keep_requests) for spec in replayed for capacity in capacities]
    done = replay_all(
        trace, jobs, workers=options.workers, progress=lambda done, total: progress("replays", done, total)
    )
    by_label = {curve.policy: [curve.at(capacity) for capacity in capacities] for curve in curves.values()}
    for place, spec in enumerate(replayed):
        by_label[spec.label] = done[place * len(capacities) : (place + 1) * len(capacities)]
    return tuple(replay for spec in options.policies for replay in by_label[spec.label])

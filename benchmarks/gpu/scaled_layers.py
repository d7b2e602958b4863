"""Speeds of decode steps of which some layers were measured, and how two of them are compared.

Per-layer work and traffic are real; the time of a step is that of the measured layers times the model's layers over
them, and budgets are scaled alike. Rows "with modelled weights" add the time of reading the weights once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from device_clock import Samples
from device_run import DeviceRun
from report import Row

from kvcm.gpu_tier.eval.model_shapes import Device, ModelShape
from kvcm.gpu_tier.eval.roofline import Traffic, step_time

__all__ = ["Layers", "Speed", "best"]

_NOTHING = Traffic(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Speed:
    """One batch of one way: tokens per second of attention alone and with modelled weights, and whether in a graph."""

    name: str
    batch: int
    attention: float
    with_weights: float
    is_graph: bool


@dataclass(frozen=True, slots=True)
class Layers:
    """A model of which some layers are measured.

    Attributes:
        this: the run.
        model: all of it.
        measured: layers.
    """

    this: DeviceRun
    model: ModelShape
    measured: int

    @property
    def shape(self) -> ModelShape:
        """The model with the measured layers alone."""
        return replace(self.model, geometry=replace(self.model.geometry, num_layers=self.measured))

    @property
    def scale(self) -> float:
        """Layers of the model over the measured ones."""
        return self.model.geometry.num_layers / self.measured

    @property
    def label(self) -> str:
        """What a row says of the measured layers."""
        return f"{self.measured} of {self.model.geometry.num_layers} layers, extrapolated"

    @property
    def device(self) -> Device:
        """The measured peaks of the device."""
        return Device(self.this.peaks.hbm, self.this.peaks.h2d, self.this.peaks.flops)

    def publish(self, case: str, name: str, batch: int, samples: Samples) -> Speed:
        """Publish time and speed of a way and return the latter."""
        seconds = samples.median * self.scale
        weights = step_time(self.model, self.device, _NOTHING, batch).weights
        whole = f"{case}, B={batch}: {name}"
        self.this.add_time(f"{whole} ({self.label})", samples, self.scale)
        self.this.add(Row(whole, "tokens/s, attention layers alone", batch / seconds, "1/s"))
        self.this.add(Row(whole, "tokens/s, with modelled weights", batch / (seconds + weights), "1/s"))
        return Speed(name, batch, batch / seconds, batch / (seconds + weights), samples.is_graph)

    def limits(self, case: str, request: Traffic, batch: int) -> None:
        """Publish the speed that shapes and peaks allow, with nothing hidden and with all transfers hidden."""
        time = step_time(self.model, self.device, request, batch)
        self.this.add(Row(case, "tokens/s, limit of the shapes, link not overlapped", batch / time.serial, "1/s"))
        self.this.add(Row(case, "tokens/s, limit of the shapes, link hidden", batch / time.overlapped, "1/s"))

    def compare(
        self, case: str, ours: Speed, theirs: Speed, dense_share: float | None, goal: float | None = None
    ) -> None:
        """Publish how much faster one way is than another, if full attention reaches enough of the roofline there.

        Args:
            case: how they are compared.
            ours: one way.
            theirs: the other.
            dense_share: what full attention reaches of the roofline; None where it was not measured.
            goal: the least speed-up with modelled weights; None to report only.
        """
        over, graphs = f"{theirs.name} at B={theirs.batch}", (ours.is_graph, theirs.is_graph)
        label = f"{case}, {ours.name}, B={ours.batch}"
        stated = len(self.this.rows)
        gain = ours.with_weights / theirs.with_weights
        self.this.add_speed_up(label, f"{over}, with modelled weights", gain, dense_share, graphs)
        if goal is not None and len(self.this.rows) > stated and self.this.rows[stated].ratio is not None:
            self.this.rows[stated] = replace(self.this.rows[stated], target=f">= {goal}", ok=gain >= goal)
        gain = ours.attention / theirs.attention
        self.this.add_speed_up(label, f"{over}, attention layers alone", gain, dense_share, graphs)


def best(speeds: Sequence[Speed] | Mapping[int, Speed]) -> Speed:
    """Return the fastest, weights included."""
    listed = list(speeds.values()) if isinstance(speeds, Mapping) else speeds
    return max(listed, key=lambda speed: speed.with_weights)

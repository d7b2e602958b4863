"""How many iterations of k-means fit beside the computation of a layer (PQCache, equations 1 to 3).

    t_clus(s, T) = α1 + β1·s·T + δ·s        clustering the keys of a layer of s tokens in T iterations
    t_comp(s)    = α2 + β2·s + γ2·s²        computing one layer over a prompt of s tokens
    T_max(s)     = (t_comp(s) − α1 − δ·s) / (β1·s), within the limits of the settings

The document has no δ; reading and encoding keys costs as much per token however many iterations there are, and fits are
better with it. The coefficients are fitted by least squares of relative errors to a few measurements. They belong to a
machine, its device, a number of threads and the shapes of a model: a profile on disk names them all.

A profile that is asked for and does not exist is measured and written. One that is damaged or belongs to something else
is refused: an operator named it, and neither wrong numbers nor another machine's file overwritten are what was meant.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpu_tier.errors import ConfigError

__all__ = [
    "CostModel", "Fingerprint", "Profile", "fingerprint", "fit", "fit_clustering", "fit_layer", "load", "measure",
    "obtain", "place_of", "save",
]  # fmt: skip

_CLUSTER_SIZES, _CLUSTER_ITERATIONS = (1024, 2048, 4096), (1, 3, 6)
_LAYER_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
_FEWEST_LAYERS, _LAYER_BUDGET_SECONDS = 4, 2.0

Fingerprint = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class CostModel:
    """The coefficients, in seconds.

    Attributes:
        alpha1: clustering, whatever its size.
        beta1: per token and iteration.
        delta: per token, once.
        alpha2: a layer, whatever its size.
        beta2: per token.
        gamma2: per square of the tokens.
    """

    alpha1: float
    beta1: float
    delta: float
    alpha2: float
    beta2: float
    gamma2: float

    def clustering_seconds(self, tokens: int, iterations: int) -> float:
        """Return t_clus."""
        return self.alpha1 + self.beta1 * tokens * iterations + self.delta * tokens

    def layer_seconds(self, tokens: int) -> float:
        """Return t_comp."""
        return self.alpha2 + self.beta2 * tokens + self.gamma2 * tokens**2

    def iterations(self, tokens: int, least: int, most: int) -> int:
        """Return T_max within [least, most]; `least` where measurements say that iterations cost nothing."""
        per_iteration = self.beta1 * tokens
        if per_iteration <= 0:
            return least
        fitting = (self.layer_seconds(tokens) - self.alpha1 - self.delta * tokens) / per_iteration
        return int(min(max(math.floor(fitting), least), most))


@dataclass(frozen=True, slots=True)
class Profile:
    """A fitted cost model and what it belongs to.

    Attributes:
        fingerprint: of machine and shapes.
        model: the coefficients.
        clustering_r2: share of the variance of the clustering's seconds that the model explains.
        layer_r2: likewise of the layer's.
    """

    fingerprint: Fingerprint
    model: CostModel
    clustering_r2: float
    layer_r2: float


def fingerprint(device_name: str, threads: int, shapes: Mapping[str, int]) -> Fingerprint:
    """Return what a profile belongs to: processor, cores, threads of clustering, device, torch, shapes."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "threads": threads,
        "device": device_name,
        "torch": torch.__version__,
        **shapes,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def fit_clustering(samples: Sequence[tuple[int, int, float]]) -> tuple[tuple[float, float, float], float]:
    """Return (α1, β1, δ) and R² of measurements (tokens, iterations, seconds)."""
    rows = [(1.0, tokens * iterations, tokens) for tokens, iterations, _ in samples]
    return _least_squares(rows, [seconds for *_, seconds in samples])


def fit_layer(samples: Sequence[tuple[int, float]]) -> tuple[tuple[float, float, float], float]:
    """Return (α2, β2, γ2) and R² of measurements (tokens, seconds)."""
    return _least_squares([(1.0, tokens, tokens**2) for tokens, _ in samples], [seconds for _, seconds in samples])


def _least_squares(
    rows: Sequence[tuple[float, float, float]], seconds: Sequence[float]
) -> tuple[tuple[float, float, float], float]:
    if len(set(rows)) < 3 or min(seconds) <= 0:
        allowed = "three coefficients need three different sizes, each of which took some time"
        raise ConfigError("samples", list(zip(rows, seconds, strict=True)), allowed)
    design, wanted = torch.tensor(rows, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    scale = design.abs().amax(0)  # columns of 1 to 1e9: alike for the solver
    weighted: Tensor = design / scale / wanted[:, None]
    solved = torch.linalg.lstsq(weighted, torch.ones_like(wanted)[:, None]).solution[:, 0] / scale
    left = (design @ solved - wanted).square().sum()
    spread = (wanted - wanted.mean()).square().sum()
    first, second, third = solved.tolist()
    return (first, second, third), float(1 - left / spread) if spread > 0 else 1.0


def fit(clustering: Sequence[tuple[int, int, float]], layers: Sequence[tuple[int, float]], of: Fingerprint) -> Profile:
    """Return the profile of measurements."""
    (alpha1, beta1, delta), clustering_r2 = fit_clustering(clustering)
    (alpha2, beta2, gamma2), layer_r2 = fit_layer(layers)
    return Profile(of, CostModel(alpha1, beta1, delta, alpha2, beta2, gamma2), clustering_r2, layer_r2)


def measure(
    cluster: Callable[[int, int], float], layer: Callable[[int], float], of: Fingerprint, fewest: int = 1
) -> Profile:
    """Measure and fit.

    Args:
        cluster: clusters a layer of so many tokens in so many iterations and returns the seconds that a layer takes.
        layer: computes one layer over so many tokens and returns the seconds.
        of: what is measured.
        fewest: tokens from which there is an index.
    """
    sizes = [max(tokens, (i + 1) * fewest) for i, tokens in enumerate(_CLUSTER_SIZES)]
    cluster(sizes[0], 1)  # the first call of everything is slow
    clustering = [(s, count, cluster(s, count)) for s in sizes for count in _CLUSTER_ITERATIONS]
    layer(_LAYER_SIZES[0])
    layers: list[tuple[int, float]] = []
    for tokens in _LAYER_SIZES:
        if len(layers) >= _FEWEST_LAYERS and sum(seconds for _, seconds in layers) > _LAYER_BUDGET_SECONDS:
            break
        layers.append((tokens, layer(tokens)))
    return fit(clustering, layers, of)


def save(path: Path, profile: Profile) -> None:
    """Write a profile; whoever reads meanwhile sees the old one or the new one."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.write_text(json.dumps(asdict(profile), indent=2) + "\n")
    fresh.replace(path)


def load(path: Path, of: Fingerprint) -> Profile:
    """Return a profile from disk.

    Raises:
        ConfigError: it is damaged, or belongs to another machine or other shapes.
    """
    try:
        data = json.loads(path.read_text())
        model = CostModel(**{name: _number(value) for name, value in data["model"].items()})
        profile = Profile(dict(data["fingerprint"]), model, _number(data["clustering_r2"]), _number(data["layer_r2"]))
        differing = sorted(
            name for name in {*of, *profile.fingerprint} if of.get(name) != profile.fingerprint.get(name)
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        allowed = f"no profile of clustering can be read there ({error}); delete it to have it measured anew"
        raise ConfigError("profile", str(path), allowed) from error
    if differing:
        now = {name: of.get(name) for name in differing}
        was = {name: profile.fingerprint.get(name) for name in differing}
        allowed = f"belongs to {was}, this is {now}; name another file, which will then be measured"
        raise ConfigError("profile", str(path), allowed)
    return profile


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)


_measured: dict[tuple[tuple[str, str | int], ...], Profile] = {}


def obtain(path: str, of: Fingerprint, take: Callable[[], Profile]) -> Profile:
    """Return the profile of settings.

    Args:
        path: where it is; if there is none it is taken and written there. "" takes it once in a process.
        of: what it must belong to.
        take: measures.

    Raises:
        ConfigError: see `load` and `place_of`.
    """
    if not path:
        key = tuple(sorted(of.items()))
        if key not in _measured:
            _measured[key] = take()
        return _measured[key]
    place = place_of(path)
    if place.exists():
        return load(place, of)
    profile = take()
    save(place, profile)
    return profile


def place_of(path: str) -> Path:
    """Return where a profile is, or can be written.

    Raises:
        ConfigError: it can not: there is no such folder, or nothing may be written in it.
    """
    place = Path(path)
    if not place.exists() and not os.access(place.parent, os.W_OK | os.X_OK):
        raise ConfigError("profile", path, f"{place.parent} must be a folder in which it can be written")
    return place

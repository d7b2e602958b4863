"""The command `gpu_tier`: capacity plans for a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

try:
    from kvcm.gpu_tier.config import ALGORITHMS, SparseConfig
    from kvcm.gpu_tier.errors import ConfigError
    from kvcm.gpu_tier.eval.capacity_plan import Advice, Limits, Plan, Workload, advise, plan
    from kvcm.gpu_tier.eval.model_shapes import MODEL_SHAPES, Device, ModelShape, model_shape
    from kvcm.gpu_tier.geometry import KVDtype
except ModuleNotFoundError as missing:
    sys.exit(f"gpu_tier: {missing.name} is not installed; the GPU tier needs: pip install 'kvcm[gpu]'")

__all__ = ["main"]

_GIB = 1 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, or 2 when an argument is not allowed."""
    options = _parser().parse_args(arguments)
    try:
        print(_plan(options))  # noqa: T201 - what the command is for
    except ConfigError as error:
        print(f"gpu_tier: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_tier", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    text = "the largest batch that fits, and what limits it"
    added = commands.add_parser(
        "plan", help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    _add_workload(added)
    _add_machine(added)
    added.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-shape", default="llama3-8b", help=f"one of {', '.join(MODEL_SHAPES)}")
    parser.add_argument("--kv-dtype", help=f"form of the KV instead of the model's: {', '.join(KVDtype)}")
    parser.add_argument("--page-size", type=int, help="tokens of a page instead of the model's")
    parser.add_argument("--algorithm", default="dsa", help=f"one of {', '.join(ALGORITHMS)}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, algo.KEY its own")
    parser.add_argument("--tokens", type=int, default=131072, help="tokens of each request")
    parser.add_argument("--hit-rate", type=float, required=True, help="share of selected items on the device already")


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu-gib", type=float, required=True, help="memory of the GPU")
    parser.add_argument("--host-gib", type=float, required=True, help="host memory that may be pinned")
    parser.add_argument("--latency-ms", type=float, help="most time of a decode step")
    parser.add_argument("--reserve-gib", type=float, default=4.0, help="device memory for everything else")
    parser.add_argument("--staging-requests", type=int, default=1, help="requests in prefill at a time")
    parser.add_argument("--hbm-gbps", type=float, default=4300.0, help="measured speed of device memory, GB/s")
    parser.add_argument("--link-gbps", type=float, default=55.0, help="measured peak of the link, GB/s")
    parser.add_argument("--link-efficiency", type=float, default=0.7, help="share of it that scattered rows reach")
    parser.add_argument("--tflops", type=float, default=790.0, help="measured speed of bf16 products")
    parser.add_argument(
        "--layer-overhead-us", type=float, default=0.0, help="time of a sparse layer that nothing hides"
    )


def _check(options: argparse.Namespace) -> None:
    """Refuse numbers by the name of their option, before they become bytes and seconds."""
    above = ("gpu_gib", "latency_ms", "hbm_gbps", "link_gbps", "tflops", "tokens", "page_size")
    least = ("host_gib", "reserve_gib", "staging_requests", "layer_overhead_us")
    for name in (*above, *least):
        value = getattr(options, name)
        if value is not None and (not isfinite(value) or value < 0 or (value == 0 and name in above)):
            raise ConfigError(name, value, "must be above 0" if name in above else "must be at least 0")


def _plan(options: argparse.Namespace) -> str:
    _check(options)
    dtype = _dtype(options.kv_dtype)
    shape = model_shape(options.model_shape).with_kv(dtype, options.page_size)
    device = Device(
        hbm_bytes_per_second=options.hbm_gbps * 1e9,
        link_bytes_per_second=options.link_gbps * 1e9,
        flops_per_second=options.tflops * 1e12,
        link_efficiency=options.link_efficiency,
        layer_overhead_seconds=options.layer_overhead_us * 1e-6,
    )
    latency = None if options.latency_ms is None else options.latency_ms * 1e-3
    limits = Limits(
        gpu_bytes=int(options.gpu_gib * _GIB),
        host_bytes=int(options.host_gib * _GIB),
        latency_seconds=latency,
        reserve_bytes=int(options.reserve_gib * _GIB),
        staging_requests=options.staging_requests,
    )
    config = SparseConfig.parse(_settings(options.algorithm, options.set))
    workload = Workload(options.tokens, options.hit_rate)
    best = plan(shape, device, config, workload, limits)
    advice = advise(shape, device, config, workload, limits)
    if options.json:
        return json.dumps(_document(shape, workload, best, advice), indent=1)
    return "\n".join([*_lines(shape, workload, best), "", *(line for one in advice for line in _advice_lines(one))])


def _dtype(name: str | None) -> KVDtype | None:
    if name is not None and name not in list(KVDtype):
        raise ConfigError.choice("kv_dtype", name, KVDtype)
    return None if name is None else KVDtype(name)


def _settings(algorithm: str, assignments: Sequence[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {"algorithm": algorithm, "algo": {}}
    for assignment in assignments:
        key, separator, value = assignment.partition("=")
        if not separator:
            raise ConfigError("set", assignment, "must be KEY=VALUE")
        target = settings["algo"] if key.startswith("algo.") else settings
        target[key.removeprefix("algo.")] = _value(value)
    return settings


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _document(shape: ModelShape, workload: Workload, best: Plan, advice: Sequence[Advice]) -> dict[str, Any]:
    def described(one: Plan) -> dict[str, Any]:
        times = {"serial": one.step.serial, "overlapped": one.step.overlapped} if one.step else {}
        return asdict(one) | {"tokens_per_second": one.tokens_per_second, "step_seconds": times}

    rivals = [asdict(one) | {"rival": described(one.rival)} for one in advice]
    return {"model": shape.name, "workload": asdict(workload), "plan": described(best), "against": rivals}


def _lines(shape: ModelShape, workload: Workload, best: Plan) -> list[str]:
    request = best.request
    rows = [
        ("model", f"{shape.name}, {shape.geometry.dtype} KV, {workload.n_tokens:,} tokens per request"),
        ("algorithm", f"{best.algorithm}, residency {best.residency}, hit rate {workload.hit_rate:.2f} (an input)"),
        ("largest batch", f"{best.batch}, limited by {best.binds}"),
        *((f"  {name} alone", "no limit" if most is None else f"{most}") for name, most in best.limits.items()),
        ("GPU, fixed", f"{best.fixed_bytes / 1e9:,.2f} GB (weights, reserve, prefill)"),
        ("GPU per request", f"{request.device / 1e9:,.3f} GB"),
        ("  buffer or KV", f"{request.kv / 1e9:,.3f} GB"),
        ("  dense layers", f"{request.dense_layers / 1e9:,.3f} GB"),
        ("  representations", f"{request.representations / 1e9:,.3f} GB"),
        ("  tables, state", f"{request.tables / 1e9:,.3f} GB"),
        *([("  execution buffer", f"{request.execution / 1e9:,.3f} GB")] if request.execution else []),
        ("host per request", f"{request.host / 1e9:,.3f} GB"),
    ]
    if best.step is not None:
        rows += [
            ("step", f"{best.step.serial * 1e3:,.2f} ms, {best.step.overlapped * 1e3:,.2f} ms if all overlapped"),
            ("  weights", f"{best.step.weights * 1e3:,.2f} ms"),
            ("  scores, attention", f"{best.step.attention * 1e3:,.2f} ms"),
            ("  misses", f"{best.step.link * 1e3:,.2f} ms"),
            ("  overhead", f"{best.step.overhead * 1e3:,.2f} ms"),
            ("tokens/s", f"{best.tokens_per_second:,.0f} (a bound from shapes, not a measurement)"),
        ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _advice_lines(one: Advice) -> list[str]:
    name = f"{one.rival.algorithm} on the device"
    head = f"against {name} (batch {one.rival.batch}, {one.rival.tokens_per_second:,.0f} tokens/s):"
    if one.from_batch is None:
        return [f"{head} offload wins at no batch that fits; keep the KV on the device where it fits"]
    ratio = "" if one.ratio_at_one is None else f"; {one.ratio_at_one:.2f}x at one request"
    return [f"{head} offload wins from a batch of {one.from_batch} on{ratio}"]

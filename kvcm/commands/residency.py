"""`kvcm residency` and `kvcm score`: what engines hold in their own memory, and which of them serves a prompt best."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvcm.commands.blocks import Prompt
from kvcm.commands.connection import Connection, instance_ids
from kvcm.commands.options import AsJson, with_options
from kvcm.commands.output import plain_fields, print_below, print_json, print_table
from kvcm.model.units import format_size
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb
from kvcm.terminal.exit_codes import exit_on_call_errors

__all__ = ["residency", "score"]

Instance = Annotated[str, typer.Argument(metavar="INSTANCE", help="Id of the instance.", autocompletion=instance_ids)]
_MEDIA = {pb.MEDIUM_GPU: "gpu", pb.MEDIUM_HOST: "host", pb.MEDIUM_DISK: "disk"}
_STATES = {pb.REPORTER_COMPLETE: "complete", pb.REPORTER_PARTIAL: "partial", pb.REPORTER_QUIET: "quiet"}


@with_options
def residency(connection: Connection, instance: Instance, as_json: AsJson = False) -> None:
    """Show which engines report the blocks in their memory, and how many each holds.

    A partial reporter may hold more than is known, until it has sent a snapshot. The blocks of a quiet one do not
    count: it has reported nothing for too long.
    """
    with exit_on_call_errors():
        request = pb.ListReportersRequest(instance_id=instance)
        answer = connection.data().call("ListReporters", request, pb.ListReportersResponse)
    if as_json:
        print_json(plain_fields(answer))
        return
    columns = ("engine", "rank", "state", *(f"{name} blocks" for name in _MEDIA.values()), "last report", "gaps")
    print_table(columns, map(_reporter_row, answer.reporters), words=("state",))
    print_below(f"{answer.blocks:,} blocks in engines' memory, known in {format_size(answer.memory_bytes)}")


def _reporter_row(reporter: pb.Reporter) -> tuple[str, ...]:
    blocks = {each.medium: each.blocks for each in reporter.media}
    return (
        reporter.engine,
        str(reporter.rank),
        _STATES.get(reporter.state, "unknown"),
        *(f"{blocks.get(medium, 0):,}" for medium in _MEDIA),
        f"{reporter.quiet_ms / 1000:.1f} s ago",
        f"{reporter.gaps:,}",
    )


@with_options
def score(
    connection: Connection,
    instance: Instance,
    prompt: Prompt,
    engines: Annotated[
        list[str] | None,
        typer.Option("--engine", metavar="HOST:PORT", help="A candidate; may be repeated. Default: all that report."),
    ] = None,
    cache_salt: Annotated[str, typer.Option("--cache-salt", metavar="SALT", help="Salt of the request.")] = "",
    as_json: AsJson = False,
) -> None:
    """Show how much of a prompt each engine holds, and what it saves; the best engine comes first.

    Tokens become block keys in the way of the instance's engines, as their reporters announced it.
    """
    with exit_on_call_errors():
        name, values = prompt.values()
        request = pb.ScoreRequest(instance_id=instance, engines=engines or [], cache_salt=cache_salt)
        getattr(request, name).extend(values)
        answer = connection.data().call("Score", request, pb.ScoreResponse)
    if as_json:
        print_json(plain_fields(answer))
        return
    columns = ("engine", "rank", "gpu", "+ host", "+ disk", "+ storage", "load", "compute", "saves", "known")
    print_table(columns, map(_score_row, answer.engines), words=("known",))
    print_below(f"of {answer.prompt_tokens:,} tokens; {answer.storage_tokens:,} of them lie in storages")


def _score_row(each: pb.EngineScore) -> tuple[Any, ...]:
    tokens = (each.gpu_tokens, each.host_tokens, each.disk_tokens, each.storage_tokens)
    return (
        each.engine,
        str(each.rank),
        *(f"{count:,}" for count in tokens),
        *(f"{seconds:.3f} s" for seconds in (each.load_seconds, each.compute_seconds, each.score)),
        "all" if each.is_complete else "in part",
    )

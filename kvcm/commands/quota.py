"""`kvcm quota`: limits over several instance groups."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcm.commands.completion import quota_names
from kvcm.commands.connection import Connection
from kvcm.commands.options import AsJson, noun, with_options
from kvcm.commands.shown import plain_fields, print_json, print_table
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.refusals import asking
from kvcm.sizes import parse_size, shown_size

__all__ = ["quota_app"]

quota_app = noun("quota", "Limits over several instance groups, by their global_quota_group_name.")


@quota_app.command("set")
@with_options
def set_quota(
    connection: Connection,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="The global_quota_group_name of the groups.", autocompletion=quota_names),
    ],
    capacity: Annotated[str, typer.Option("--capacity", metavar="SIZE", help="As in 10GiB, 500MB or plain bytes.")],
    mark: Annotated[
        float, typer.Option("--mark", metavar="RATIO", help="Evict above this share; above 1 is never, 0 is 0.9.")
    ] = 0.0,
) -> None:
    """Limit what all groups of one name use together; in force at once."""
    with asking():
        quota = capacity_pb.GlobalQuota(name=name, capacity_bytes=parse_size(capacity), used_percentage=mark)
        request = capacity_pb.SetGlobalQuotaRequest(global_quota=quota)
        connection.admin().call("SetGlobalQuota", request, admin_pb.CommonResponse)


@quota_app.command("list")
@with_options
def list_quotas(connection: Connection, as_json: AsJson = False) -> None:
    """List the limits over groups."""
    with asking():
        request = capacity_pb.ListGlobalQuotaRequest()
        answer = connection.admin().call("ListGlobalQuota", request, capacity_pb.ListGlobalQuotaResponse)
    quotas = [plain_fields(quota) for quota in answer.global_quotas]
    if as_json:
        print_json({"global_quotas": quotas})
        return
    rows = ((each["name"], shown_size(each["capacity_bytes"]), _shown_mark(each["used_percentage"])) for each in quotas)
    print_table(("global quota", "capacity", "evict above"), rows)


@quota_app.command("remove")
@with_options
def remove_quota(
    connection: Connection,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The limit.", autocompletion=quota_names)],
) -> None:
    """Forget a limit over groups; in force at once."""
    with asking():
        request = capacity_pb.RemoveGlobalQuotaRequest(name=name)
        connection.admin().call("RemoveGlobalQuota", request, admin_pb.CommonResponse)


def _shown_mark(ratio: float) -> str:
    return "never" if ratio > 1 else f"{100 * (ratio or 0.9):g} %"

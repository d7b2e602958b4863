"""`kvcm instance`: the registered instances of a manager."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcm.commands.blocks import instance_info
from kvcm.commands.connection import Connection, group_names, instance_ids
from kvcm.commands.options import AsJson, Yes, confirm, noun, with_options
from kvcm.commands.output import plain, print_fields, print_json, print_table
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.units import format_size, parse_size
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.terminal.exit_codes import exit_on_call_errors

__all__ = ["instance_app"]

instance_app = noun("instance", "Instances of a running manager: one model deployment with one KV layout each.")

Instance = Annotated[str, typer.Argument(metavar="INSTANCE", help="Id of the instance.", autocompletion=instance_ids)]


@instance_app.command("list")
@with_options
def list_instances(
    connection: Connection,
    group: Annotated[
        str, typer.Option("--group", metavar="NAME", help="Only those of this group.", autocompletion=group_names)
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the instances; `kvcm usage` shows what they use."""
    with exit_on_call_errors():
        request = pb.ListInstanceInfoRequest(instance_group_name=group)
        answer = connection.admin().call("ListInstanceInfo", request, pb.ListInstanceInfoResponse)
    if as_json:
        print_json({"instances": [plain(each) for each in answer.instance_info]})
        return
    columns = ("instance", "group", "model", "dtype", "tokens per block", "parts", "bytes per block")
    rows = (
        (
            each.instance_id,
            each.instance_group_name,
            each.model_deployment.model_name,
            each.model_deployment.dtype,
            f"{each.block_size:,}",
            f"{len(each.location_spec_infos):,}",
            format_size(sum(spec.size for spec in each.location_spec_infos)),
        )
        for each in answer.instance_info
    )
    print_table(columns, rows, words=("group", "model", "dtype"))


@instance_app.command("show")
@with_options
def show_instance(connection: Connection, instance: Instance, as_json: AsJson = False) -> None:
    """Show an instance as it was registered, and which of several managers it is assigned to."""
    with exit_on_call_errors():
        client = connection.admin()
        found = instance_info(client, instance)
        request = pb.GetManagerClusterInfoRequest(instance_id=instance)
        cluster = client.call("GetManagerClusterInfo", request, pb.GetManagerClusterInfoResponse)
    if as_json:
        print_json(plain(found))
        return
    model = plain(found.model_deployment)
    print_fields(
        [
            ("id", found.instance_id),
            ("group", found.instance_group_name),
            ("global quota", found.quota_group_name),
            ("tokens per block", str(found.block_size)),
            *((name.replace("_", " "), str(value)) for name, value in model.items() if value),
            *((f"part {spec.name}", format_size(spec.size)) for spec in found.location_spec_infos),
            *((f"parts {group.name}", ", ".join(group.spec_names)) for group in found.location_spec_groups),
            *(("assigned manager", f"{each.node_id} at {_address(each)}") for each in cluster.preferred_managers[:1]),
        ]
    )


@instance_app.command("register")
@with_options
def register_instance(
    connection: Connection,
    instance: Annotated[str, typer.Argument(metavar="INSTANCE", help="Id of the instance, not taken yet.")],
    group: Annotated[
        str, typer.Option("--group", metavar="NAME", help="The group to join.", autocompletion=group_names)
    ],
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Name of the model.")],
    dtype: Annotated[str, typer.Option("--dtype", metavar="NAME", help="Data type of its KV, as in bfloat16.")],
    block_size: Annotated[int, typer.Option("--block-size", metavar="N", min=1, help="Tokens per block.")],
    specs: Annotated[
        list[str],
        typer.Option(
            "--spec", metavar="NAME=SIZE", help="A part of every block and its bytes, as in tp0=1MiB; repeatable."
        ),
    ],
) -> None:
    """Register an instance, for tests: engines register themselves. With the same settings again it is no error."""
    with exit_on_call_errors():
        request = pb.RegisterInstanceRequest(
            instance_group=group,
            instance_id=instance,
            block_size=block_size,
            location_spec_infos=[_spec(text) for text in specs],
            model_deployment=pb.ModelDeployment(model_name=model, dtype=dtype, tp_size=1, dp_size=1, pp_size=1),
        )
        connection.admin().call("RegisterInstance", request, pb.CommonResponse)


@instance_app.command("remove")
@with_options
def remove_instance(connection: Connection, instance: Instance, yes: Yes = False) -> None:
    """Forget an instance and, in the background, delete all its blocks."""
    confirm(f"Delete instance {instance} and all its blocks?", yes=yes)
    with exit_on_call_errors():
        request = pb.RemoveInstanceRequest(instance_id=instance)
        connection.admin().call("RemoveInstance", request, pb.CommonResponse)


def _address(endpoint: pb.NodeEndpoint) -> str:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{host}:{endpoint.meta_rpc_port}"


def _spec(text: str) -> pb.LocationSpecInfo:
    name, separator, size = text.rpartition("=")
    if not separator or not name:
        raise InvalidArgumentError(f"--spec {text!r} must be a name and a size: tp0=1MiB")
    return pb.LocationSpecInfo(name=name, size=parse_size(size))

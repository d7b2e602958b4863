"""`kvcm pin`: prefixes that are kept from eviction."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcm.capacity_tables import shown_time
from kvcm.commands.blocks_named import Prompt, instance_info
from kvcm.commands.completion import instance_ids
from kvcm.commands.connection import Connection
from kvcm.commands.options import AsJson, noun, with_options
from kvcm.commands.shown import plain_fields, print_json, print_table
from kvcm.model.errors import InvalidArgumentError
from kvcm.protocol import meta_service_pb2 as meta_pb
from kvcm.protocol.kvcm.v1 import pin_service_pb2 as pin_pb
from kvcm.refusals import asking
from kvcm.sizes import shown_size
from kvcm.spans import parse_span

__all__ = ["pin_app"]

pin_app = noun("pin", "Prefixes that are kept from eviction.")

Instance = Annotated[str, typer.Argument(metavar="INSTANCE", help="Id of the instance.", autocompletion=instance_ids)]


@pin_app.command("list")
@with_options
def list_pins(connection: Connection, instance: Instance, as_json: AsJson = False) -> None:
    """List the pins of an instance; those that end first come first."""
    with asking():
        request = pin_pb.ListPinsRequest(instance_id=instance)
        answer = connection.data().call("ListPins", request, pin_pb.ListPinsResponse)
    pins = [plain_fields(pin) for pin in answer.pins]
    if as_json:
        print_json({"pins": pins})
        return
    rows = (
        (pin["pin_id"], pin["owner"], f"{pin['blocks']:,}", shown_size(pin["bytes"]), shown_time(pin["deadline_ms"]))
        for pin in pins
    )
    print_table(("pin", "owner", "blocks", "bytes", "until"), rows, words=("owner", "until"))


@pin_app.command("add")
@with_options
def add_pin(
    connection: Connection,
    instance: Instance,
    prompt: Prompt,
    owner: Annotated[str, typer.Option("--owner", metavar="NAME", help="Who pins; shown in lists.")],
    ttl: Annotated[str, typer.Option("--ttl", metavar="TIME", help="For how long, at most 30d: as in 90s, 15m, 12h.")],
    as_json: AsJson = False,
) -> None:
    """Keep the longest readable prefix of a prompt from eviction.

    It takes from the pin budget of the group: `kvcm group update NAME --pin-budget SIZE`.
    """
    with asking():
        block_size = instance_info(connection.admin(), instance).block_size
        request = pin_pb.PinPrefixRequest(
            instance_id=instance,
            block_keys=prompt.block_keys(block_size),
            owner=owner,
            ttl_seconds=parse_span(ttl),
        )
        answer = connection.data().call("PinPrefix", request, pin_pb.PinPrefixResponse)
        if not answer.pin_id:
            raise InvalidArgumentError(f"nothing of the prompt can be read in instance {instance!r}: nothing is pinned")
    if as_json:
        print_json(plain_fields(answer))
        return
    asked = len(request.block_keys)
    typer.echo(
        f"pin {answer.pin_id}: {answer.pinned_blocks:,} of {asked:,} blocks, {shown_size(answer.pinned_bytes)}, "
        f"until {shown_time(answer.deadline_ms)}"
    )


@pin_app.command("remove")
@with_options
def remove_pin(
    connection: Connection,
    instance: Instance,
    pin: Annotated[str, typer.Argument(metavar="PIN", help="Id of the pin, as listed.")],
) -> None:
    """End a pin early; one that is not there is no error."""
    with asking():
        request = pin_pb.UnpinPrefixRequest(instance_id=instance, pin_id=pin)
        connection.data().call("UnpinPrefix", request, meta_pb.CommonResponse)

"""Whose address it is: of IPv6 everybody has a whole network, and so as many addresses as he likes."""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote

__all__ = ["network_of"]

_OWN_BITS = 64  # RFC 6177: no site has less


def network_of(peer: str) -> str:
    """Return what stands for whoever has an address: itself, of IPv6 its network of 64 bits. What is no address stands
    for itself."""
    try:
        address = ipaddress.ip_address(unquote(peer).strip("[]"))
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.IPv6Network((int(address), _OWN_BITS), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)

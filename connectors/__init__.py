"""Clients of the manager inside engine processes: they match and write blocks, and move the bytes themselves.

Works with the base install (grpcio, protobuf, numpy); torch and transformers are needed only by
`kvcm.connectors.layout`'s tensor functions and by `kvcm.connectors.transformers`.
"""

if __name__ == "connectors":  # imported by its old name: until the next release
    from kvcm.old_names import alias_package

    alias_package("connectors", "kvcm.connectors")

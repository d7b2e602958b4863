"""What runs inside the engine processes: asks the manager where blocks of KV lie, and moves their bytes itself.

Works with the base install (grpcio, protobuf, numpy); torch and transformers are needed only by `connectors.layout`'s
tensor functions and by `connectors.transformers`.
"""

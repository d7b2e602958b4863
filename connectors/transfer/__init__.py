"""Moves the bytes of blocks between engine memory and storages: one mover per storage type behind one engine."""

from kvcm.connectors.transfer.engine import MOVERS, CancelToken, TransferEngine
from kvcm.connectors.transfer.file import FileMover
from kvcm.connectors.transfer.mover import Failure, Mover, TransferItem, TransferResult, checksum_of
from kvcm.connectors.transfer.statistics import EngineStatistics, StorageStatistics

__all__ = [
    "MOVERS",
    "CancelToken",
    "EngineStatistics",
    "Failure",
    "FileMover",
    "Mover",
    "StorageStatistics",
    "TransferEngine",
    "TransferItem",
    "TransferResult",
    "checksum_of",
]

"""Moves the bytes of blocks between engine memory and storages: one mover per storage type behind one engine."""

from connectors.transfer.engine import MOVERS, CancelToken, TransferEngine
from connectors.transfer.file import FileMover
from connectors.transfer.mover import Failure, Mover, TransferItem, TransferResult, checksum_of
from connectors.transfer.statistics import EngineStatistics, StorageStatistics

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

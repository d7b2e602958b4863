"""Moves the bytes of blocks between engine memory and storages: one mover per storage type behind one engine."""

from connectors.transfer.engine import MOVERS, TransferEngine
from connectors.transfer.file import FileMover
from connectors.transfer.mover import Failure, Mover, TransferItem, TransferResult

__all__ = ["MOVERS", "Failure", "FileMover", "Mover", "TransferEngine", "TransferItem", "TransferResult"]

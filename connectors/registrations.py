"""What the verdict of a registration means."""

from __future__ import annotations

import logging

from connectors.calls import AnswerT
from connectors.policy import Verdict
from connectors.results import Registration, RegistrationState
from connectors.storages import read_storage_configs
from kvcm.model.errors import ErrorCode
from kvcm.protocol import meta_service_pb2 as meta

__all__ = ["answer_of", "not_registered", "registered"]

_log = logging.getLogger(__name__)

# Codes that a later registration may not meet again; every other one is a conflict that somebody has to resolve.
_PASSING_CODES = frozenset({ErrorCode.SERVICE_NOT_READY, ErrorCode.SERVER_NOT_LEADER, ErrorCode.IO_ERROR})


def answer_of(verdict: Verdict[AnswerT]) -> AnswerT:
    """Return the answer of a verdict that is ok."""
    assert verdict.answer is not None  # there is one when the outcome is ok
    return verdict.answer


def registered(verdict: Verdict[meta.RegisterInstanceResponse]) -> Registration:
    """Return what a manager's yes means."""
    storages = read_storage_configs(answer_of(verdict).storage_configs)
    return Registration(RegistrationState.OK, storages, verdict.code)


def not_registered(verdict: Verdict[meta.RegisterInstanceResponse]) -> Registration:
    """Return what a no means, or no answer: whether it is worth trying again."""
    if verdict.code is None or verdict.code in _PASSING_CODES:
        return Registration(RegistrationState.UNREACHABLE, code=verdict.code, message=verdict.reason)
    _log.error(
        "the manager refuses to register the instance; KV is not reused until this is resolved: %s", verdict.reason
    )
    return Registration(RegistrationState.REFUSED, code=verdict.code, message=verdict.reason)

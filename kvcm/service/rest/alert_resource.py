"""/v1/alerts."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from kvcm.service.rest.calls import CallRunner
from kvcm.service.rest.conversion import message_to_dict
from kvcm.service.rest.documents import Document, Int64
from kvcm.service.rest.routing import add_route, answer

__all__ = ["AlertDocument", "AlertResource", "AlertsDocument"]

_PREFIX: Final = "ALERT_"


class SubjectDocument(Document):
    """The subject of an alert."""

    kind: Literal["group", "storage", "manager", "cluster"]
    """Its kind."""
    name: str
    """Its name; empty for the cluster."""


class AlertDocument(Document):
    """A problem, as the manager that answers sees it."""

    name: str
    """That of the rule for Prometheus, where there is one of the same meaning."""
    severity: Literal["page", "ticket", "info"]
    """page: act now. ticket: act within days. info: good to know."""
    subject: SubjectDocument
    """The entity that it is about."""
    summary: str
    """The problem, in one sentence."""
    reason: str
    """Why."""
    advice: str
    """What to do."""
    since_ms: Int64
    """Since when this manager sees it, unix time in ms."""


class AlertsDocument(Document):
    """The alerts of a deployment."""

    items: list[AlertDocument]
    """The worst first, then by name and subject."""


class AlertQuery(BaseModel):
    """Whose alerts."""

    model_config = ConfigDict(extra="forbid")

    group: Annotated[str, Field(max_length=256, description="Only what concerns this group and its storages.")] = ""


class AlertResource:
    """Alerts.

    Args:
        calls: runs the calls behind it.
    """

    def __init__(self, calls: CallRunner) -> None:
        self._calls = calls

    def routes(self, router: APIRouter) -> None:
        """Add the route."""
        add_route(router=router, method="GET", path="/v1/alerts", endpoint=self.list_alerts, model=AlertsDocument)

    async def list_alerts(self, request: Request, query: Annotated[AlertQuery, Query()]) -> Response:
        """List problems, their reasons, and what to do. A principal of some groups gets the alerts of these alone."""
        listed = await self._calls.run(request, "InsightService.ListAlerts", instance_group=query.group)
        return answer({"items": [_alert(message_to_dict(alert)) for alert in listed.alerts]})


def _alert(alert: dict[str, Any]) -> dict[str, Any]:
    subject = {"kind": alert.pop("subject_kind"), "name": alert.pop("subject_name")}
    return {**alert, "severity": alert["severity"].removeprefix(_PREFIX).lower(), "subject": subject}

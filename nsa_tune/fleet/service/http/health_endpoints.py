"""Addresses that tell of the service itself: its metrics, and that it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from nsa_tune.fleet.service.http.messages import answer
from nsa_tune.fleet.service.service import Service

if TYPE_CHECKING:
    from starlette.requests import Request


class HealthEndpoints:
    """What the service answers about itself."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        del request
        text = await self._service.in_state(self._service.metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def health(self, request: Request) -> Response:
        """That it answers; nothing else, as it needs no token."""
        del request
        return answer({"ok": True})

"""Applies the suite's policy for Host, Origin and content type headers to the requests of the gateway."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.types import ASGIApp

from services.common.net.http_policy import HttpPolicy, HttpRefusal, PolicyMiddleware, http_policy
from services.gateway.http.errors import plain_error_response


def host_policy(listen: str, hosts: Sequence[str], origins: Sequence[str]) -> HttpPolicy:
    """Returns the policy of a server by its address and the settings of the same names."""
    return http_policy(listen, hosts, origins, hosts_setting="--allowed-hosts", origins_setting="--allowed-origins")


class HostMiddleware(PolicyMiddleware):
    """Rejects requests that the policy does not accept.

    Args:
        on_refused: called with "host", "origin" or "content_type" for each rejected request.
    """

    def __init__(self, app: ASGIApp, policy: HttpPolicy, on_refused: Callable[[str], None]) -> None:
        super().__init__(app, policy, self._response)
        self._on_refused = on_refused

    def _response(self, refusal: HttpRefusal) -> Response:
        self._on_refused(refusal.reason)
        response = plain_error_response(refusal.message, refusal.status, code=refusal.code)
        if refusal.closes:
            response.headers["connection"] = "close"
        return response

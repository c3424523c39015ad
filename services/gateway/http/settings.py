"""Settings of the HTTP server."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.gateway.admission.settings import AdmissionSettings


class HttpSettings(AdmissionSettings):
    """How HTTP is served, to whom, and what a connection may do."""

    http_server: Literal["uvicorn", "granian"] = Field(
        "uvicorn", description="implementation of HTTP; granian needs sluice-llm[granian] and bounds slow readers less"
    )
    max_connections: int = Field(16_384, ge=1, description="connections open at once; more are closed at once")
    max_header_kb: int = Field(32, ge=1, le=1024, description="largest request line and headers together, KiB")
    header_timeout_s: float = Field(15, gt=0, description="longest wait for the headers of a request that began")
    write_timeout_s: float = Field(60, gt=0, description="a client that takes nothing for this long is cut")
    comment_every_s: float = Field(
        15, ge=0, description="silent event streams get a comment this often, so that proxies keep them; 0: never"
    )
    reuse_port: bool = Field(False, description="other gateway processes may listen on the same port (SO_REUSEPORT)")

"""Settings of the HTTP server."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.common.settings import CommaList
from services.gateway.admission.settings import AdmissionSettings


class HttpSettings(AdmissionSettings):
    """Settings of the HTTP server and bounds on connections."""

    http_server: Literal["uvicorn", "granian"] = Field(
        "uvicorn",
        description="HTTP server; granian requires sluice-llm[granian] and bounds slow readers less strictly",
    )
    max_connections: int = Field(
        16_384, ge=1, description="maximum number of open connections; further ones are closed immediately"
    )
    max_header_kb: int = Field(32, ge=1, le=1024, description="maximum size of request line and headers, KiB")
    header_timeout_s: float = Field(
        15, gt=0, description="longest time for the headers of a request to arrive, seconds"
    )
    write_timeout_s: float = Field(
        60, gt=0, description="longest time that a client may read nothing before it is disconnected, seconds"
    )
    comment_every_s: float = Field(
        15,
        ge=0,
        description="interval of comments that keep proxies from closing idle event streams, seconds; 0: never",
    )
    max_pipelined_requests: int = Field(
        4,
        ge=0,
        le=1000,
        description="maximum number of requests read ahead on a connection; with more, reading pauses until the "
        "current response is complete",
    )
    websocket_idle_s: float = Field(
        900, gt=0, description="WebSockets are closed after this long without a message, seconds"
    )
    websocket_lifetime_s: float = Field(
        3600, gt=0, description="longest lifetime of a WebSocket; a response in progress may end, seconds"
    )
    allowed_hosts: CommaList = Field(
        [],
        description="accepted names in Host headers; '*': any; a gateway on loopback always accepts localhost and "
        "loopback addresses and rejects other names, as protection against DNS rebinding; empty: any name, unless the "
        "gateway listens on loopback",
    )
    allowed_origins: CommaList = Field(
        [],
        description="origins of web pages from which browsers may send requests, such as https://chat.example.com, in "
        "addition to the gateway's own; only used where Host headers are checked; '*': any",
    )
    reuse_port: bool = Field(
        False, description="allow other gateway processes to listen on the same port (SO_REUSEPORT)"
    )

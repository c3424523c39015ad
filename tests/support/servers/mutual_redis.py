"""A real Redis that speaks TLS and wants a certificate of its callers."""

from __future__ import annotations

from pathlib import Path

from redis.asyncio import Redis

from services.common.net.ports import free_port
from services.common.redis.target import Credentials
from tests.support.data.authority import Authority
from tests.support.servers.redis_server import RedisServer


class MutualRedis:
    """A server that takes only callers of an authority."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.new_authority()
        self._files = [
            *("tls-cert-file", str(folder / "server.pem"), "tls-key-file", str(folder / "server.key")),
            *("tls-ca-cert-file", str(folder / "ca.pem")),
        ]
        flags = [f"--{word}" if word.startswith("tls-") else word for word in self._files]
        self.server = RedisServer(folder, "--tls-port", str(self.port), "--tls-auth-clients", "yes", *flags)

    def new_authority(self) -> None:
        """Replaces every file."""
        self.authority = Authority(self.folder)
        self.authority.issue("server")
        self.authority.issue("caller")

    async def reload(self) -> None:
        """Has the server read its files again, and cut whom it talks to."""
        async with Redis.from_url(self.server.url) as plain:
            await plain.execute_command("CONFIG", "SET", *self._files)  # type: ignore[no-untyped-call]
            await plain.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")  # type: ignore[no-untyped-call]

    @property
    def url(self) -> str:
        """For settings."""
        return f"rediss://127.0.0.1:{self.port}/0"

    @property
    def credentials(self) -> Credentials:
        """What a caller that is let in shows and trusts."""
        return Credentials(
            ca_file=self.folder / "ca.pem", cert_file=self.folder / "caller.pem", key_file=self.folder / "caller.key"
        )

"""Runs a service with scripted names of media hosts: `python -m tests.support.servers.scripted_names MODULE FLAG…`.

Preprocess resolves the names of the script in the file SCRIPTED_NAMES, trusts its certificate authority, and may
connect to EXEMPT as if that were a public address. All other checks are those of the service. Nothing leaves loopback,
even if a check fails: other names are resolved without DNS, and connections to other addresses fail.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import socket
import ssl
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

from services.preprocess.media.addresses import PublicAddresses
from services.preprocess.media.https_get import HttpsGet, resolve

SCRIPTED_NAMES = "SCRIPTED_NAMES"
EXEMPT = "127.0.0.77"
LOCAL = "localhost"

_connect = asyncio.open_connection


class ExemptAddresses(PublicAddresses):
    """Permits one address of loopback besides public ones."""

    def permits(self, address: str) -> bool:
        return address == EXEMPT or super().permits(address)


class ScriptedNames:
    """Resolves names by a script: a list of answers for each, the last of which is repeated."""

    def __init__(self, answers: dict[str, list[list[str]]]) -> None:
        self._answers = answers

    async def __call__(self, host: str, port: int) -> list[str]:
        if host == LOCAL:
            return await resolve(host, port)
        answers = self._answers.get(host)
        if answers is None:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            return [str(address[0]) for *_, address in found]
        return answers.pop(0) if len(answers) > 1 else answers[0]


def write_script(path: Path, authority: bytes, answers: dict[str, list[list[str]]]) -> None:
    """Writes the file SCRIPTED_NAMES, with the certificate of an authority in PEM."""
    path.write_text(json.dumps({"authority": authority.decode(), "answers": answers}))


def scripted_get(policy: Any, max_bytes: int, read_s: float) -> HttpsGet:
    """Returns what preprocess sends its requests with."""
    script = json.loads(Path(os.environ[SCRIPTED_NAMES]).read_text())
    tls = ssl.create_default_context(cadata=script["authority"])
    return HttpsGet(ExemptAddresses(), max_bytes, read_s, tls, ScriptedNames(script["answers"]))


async def connect_to_loopback(host: str, *args: Any, **kwargs: Any) -> Any:
    """Connects as asyncio does; raises OSError for addresses outside loopback."""
    address = ip_address(host.partition("%")[0])
    if not (getattr(address, "ipv4_mapped", None) or address).is_loopback:
        raise OSError(f"{host} is not an address of loopback")
    return await _connect(host, *args, **kwargs)


if __name__ == "__main__":
    from services.preprocess import settings

    cast(Any, settings).HttpsGet = scripted_get
    cast(Any, asyncio).open_connection = connect_to_loopback
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

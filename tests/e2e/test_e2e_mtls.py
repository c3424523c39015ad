"""A suite with zero trust: mTLS on every hop, a token for each service that another one calls, HTTPS, an audit log,
and every log line written. Everything works, strangers are refused on every port, certificates and tokens rotate under
load, and no log holds what it must not.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from redis import Redis

from services.common.base.errors import ErrorKind
from services.common.net.ports import free_port
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from services.common.security.tls import PeerCredentials, channel_credentials
from services.common.settings.service import TlsSettings
from services.gateway.admission import keys
from sluice.cli import tokens as made_tokens
from sluice.cli.certs import Options, make
from sluice.v1 import router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.data import tokens as token_files
from tests.support.data.authority import Authority
from tests.support.data.tiny_models import build_tiny_model
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.suite import Suite
from tests.support.waiting import until

GRPC_SERVICES = ("preprocess", "router", "postprocess", "worker")
CALLERS = ("gateway", *GRPC_SERVICES)
MODEL = "tiny"
ROTATED_S = 3.0
"""Files are looked at every second."""
MARK = "quagmire"
"""Begins everything that no log may hold."""


@dataclass
class Guarded:
    """A running suite and what guards it."""

    suite: Suite
    certificates: Path
    tokens: Path
    audit: Path
    redis: RedisServer
    redis_port: int
    key: str
    key_id: str
    secrets: set[str] = field(default_factory=set)

    def make_tokens(self, rotate: str = "") -> None:
        """Makes the tokens of all services, or takes a step of their rotation."""
        made_tokens.make(self.tokens, made_tokens.Options(rotate=rotate))
        for path in self.tokens.glob("*/shown-tokens"):
            self.secrets |= {line.split()[0] for line in path.read_text().splitlines()}

    def token(self, caller: str, callee: str) -> str:
        """What a service shows to another one; for an unknown caller, a token that is not listed."""
        path = self.tokens / caller / "shown-tokens"
        lines = path.read_text().splitlines() if path.exists() else []
        return next((line.split()[0] for line in lines if line.endswith(f" {callee}")), f"{MARK}-token-unlisted")

    def trust(self, name: str) -> TlsSettings:
        """What a service shows and trusts."""
        folder = self.certificates
        return TlsSettings(tls_cert=folder / f"{name}.pem", tls_key=folder / f"{name}.key", tls_ca=folder / "ca.pem")

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        context = ssl.create_default_context(cafile=str(self.certificates / "ca.pem"))
        context.load_cert_chain(self.certificates / "client.pem", self.certificates / "client.key")
        key = {"authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(
            base_url=self.suite.url, verify=context, timeout=60, trust_env=False, headers=key
        ) as http:
            yield http


def redis_behind_tls(folder: Path) -> tuple[RedisServer, int]:
    """A Redis with a password that wants certificates, and its port."""
    port, made = free_port(), folder / "certificates"
    files = [("cert", "redis.pem"), ("key", "redis.key"), ("ca-cert", "ca.pem")]
    flags = [word for name, file in files for word in (f"--tls-{name}-file", str(made / file))]
    secured = ("--tls-port", str(port), "--tls-auth-clients", "yes", *flags)
    return RedisServer(folder, *secured, "--requirepass", f"{MARK}-password"), port


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    make(folder / "certificates", Options())
    tokens = folder / "tokens"
    env = {f"SLUICE_{name.upper()}_PEER_TOKEN_FILE": str(tokens / name / "shown-tokens") for name in CALLERS}
    env |= {f"SLUICE_{name.upper()}_TOKENS_FILE": str(tokens / name / "accepted-tokens") for name in GRPC_SERVICES}
    env |= {"SLUICE_GATEWAY_AUDIT_LOG": str(folder / "audit.jsonl"), "SLUICE_GATEWAY_REQUEST_TIMEOUT_S": "60"}
    env["SLUICE_GATEWAY_API_KEYS_FILE"] = str(folder / "keys.json")
    env["SLUICE_GATEWAY_HTTPS_CLIENT_CA"] = str(folder / "certificates" / "ca.pem")
    for name in CALLERS:
        env |= {f"SLUICE_{name.upper()}_METRICS_LISTEN": "127.0.0.1:0", f"SLUICE_{name.upper()}_METRICS_TLS": "true"}
    shown, record = keys.create("tests")
    keys.write(folder / "keys.json", [record])
    redis, redis_port = redis_behind_tls(folder)
    redis_url = f"rediss://:{MARK}-password@127.0.0.1:{redis_port}/0"
    env |= {f"SLUICE_{name}_REDIS_URL": redis_url for name in ("ROUTER", "GATEWAY_LIMITS", "GATEWAY_RESPONSES")}
    for name in ("router", "gateway"):
        for what, file in (("CA", "ca.pem"), ("CERT", f"{name}.pem"), ("KEY", f"{name}.key")):
            env[f"SLUICE_{name.upper()}_REDIS_{what}_FILE"] = str(folder / "certificates" / file)
    held = Guarded(
        Suite.__new__(Suite),
        folder / "certificates",
        tokens,
        folder / "audit.jsonl",
        redis,
        redis_port,
        shown,
        record.id,
    )
    held.make_tokens()
    tls = str(folder / "certificates")
    model = ("--model", str(build_tiny_model(folder / "tiny")), "--model-name", MODEL)
    redis.start()
    try:
        with Suite("--speedup", "2", "--log-level", "debug", "--tls", tls, *model, env=env) as suite:
            held.suite = suite
            yield held
    finally:
        redis.stop()


async def chat(http: httpx.AsyncClient, text: str, tokens: int = 16) -> str:
    """A streamed answer; AssertionError when it does not end as it should."""
    body = {"model": MODEL, "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": text}]}
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        said = [line async for line in answer.aiter_lines()]
    assert "data: [DONE]" in said, said[-3:]
    assert not any('"error"' in line for line in said), said
    return "\n".join(said)


def served(address: str, certificates: Path) -> str:
    """The certificate that a port shows."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=20, ca_certs=str(certificates / "ca.pem"))


def ports(guarded: Guarded) -> list[tuple[str, str]]:
    """(service, address) of every gRPC port."""
    return [(service, address) for service in GRPC_SERVICES for address in guarded.suite.addresses(service)]


def open_ports(guarded: Guarded) -> list[tuple[str, str]]:
    """(command, host:port) of every TCP port that any process of the suite listens on, as the kernel has it."""
    root = psutil.Process(guarded.suite.pid)
    return [
        (" ".join(process.cmdline()[-6:]), f"{one.laddr.ip}:{one.laddr.port}")
        for process in [root, *root.children(recursive=True)]
        for one in process.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    ]


HELLOS = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)),
    b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"PING\r\n",
)


async def talks(address: str, trust: ssl.SSLContext | None) -> bool:
    """Whether a port answers a client with these credentials: gRPC, HTTP or Redis, in plain text or TLS."""
    host, _, port = address.rpartition(":")
    name = "localhost" if trust else None
    for hello in HELLOS:
        try:
            opening = asyncio.open_connection(host, int(port), ssl=trust, server_hostname=name)
            reader, writer = await asyncio.wait_for(opening, 20)
            writer.write(hello)
            said = await asyncio.wait_for(reader.read(9), 20)
            writer.close()
        except (OSError, TimeoutError):
            continue
        if said:
            return True
    return False


async def test_a_chat_goes_through_all_of_it(guarded: Guarded) -> None:
    assert guarded.suite.url.startswith("https://")
    async with guarded.http() as http:
        assert (await http.get("/ready")).status_code == 200
        await chat(http, f"{MARK}-prompt of a stream")
    with Redis(port=guarded.redis.port, password=f"{MARK}-password") as routers:
        assert routers.exists("{sluice}:models")  # only the router writes it, and not in plain text
    async with httpx.AsyncClient(trust_env=False) as plain:
        with pytest.raises(httpx.TransportError):
            await plain.get(guarded.suite.url.replace("https", "http"))


def shows(certificates: Path, name: str = "", authority: Path | None = None) -> ssl.SSLContext:
    """A client with a certificate of this folder, or none."""
    context = ssl.create_default_context(cafile=str(authority or certificates / "ca.pem"))
    context.set_alpn_protocols(["h2", "http/1.1"])
    if name:
        context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
    return context


@pytest.mark.parametrize("shown", ["plain", "none", "expired", "foreign"])
async def test_strangers_are_refused_on_every_port(guarded: Guarded, shown: str, tmp_path: Path) -> None:
    """gRPC, HTTPS and metrics alike: whatever a process of the suite listens on, and its Redis."""
    stranger = None
    if shown == "none":
        stranger = shows(guarded.certificates)
    elif shown == "expired":
        late = tmp_path / "late"
        shutil.copytree(guarded.certificates, late)
        make(late, Options(names=("client",), days=0, renew=True))
        stranger = shows(late, "client")
    elif shown == "foreign":
        foreign = Authority(tmp_path)
        foreign.issue("gateway")
        stranger = shows(tmp_path, "gateway", guarded.certificates / "ca.pem")
    ours = shows(guarded.certificates, "client")
    found = open_ports(guarded)
    assert len(found) == 2 * len(guarded.suite.processes())  # requests and metrics
    found.append(("redis", f"127.0.0.1:{guarded.redis_port}"))
    for process, address in found:
        assert not await talks(address, stranger), (process, address)
        assert await talks(address, ours), (process, address)


async def test_a_service_may_call_what_it_needs_and_nothing_else(guarded: Guarded) -> None:
    async def kind(caller: str, service: str) -> ErrorKind | None:
        return await outcome(guarded, guarded.token(caller, service), service)

    assert await kind("gateway", "router") is None
    assert await kind("worker", "router") is ErrorKind.PERMISSION_DENIED
    assert await kind("unlisted", "router") is ErrorKind.UNAUTHENTICATED
    assert await kind("gateway", "worker") is ErrorKind.PERMISSION_DENIED
    assert await kind("operator", "worker") not in (ErrorKind.PERMISSION_DENIED, ErrorKind.UNAUTHENTICATED)


async def test_what_a_worker_is_shown_is_good_for_workers_only(guarded: Guarded) -> None:
    for caller in ("gateway", "preprocess", "postprocess"):
        learned = guarded.token(caller, "worker")
        assert await outcome(guarded, learned, "router") is ErrorKind.UNAUTHENTICATED
        assert await outcome(guarded, learned, "worker") is ErrorKind.PERMISSION_DENIED


async def outcome(guarded: Guarded, token: str, service: str) -> ErrorKind | None:
    """How an RPC ends that only some may call, to a caller with this token; the certificate allows everything."""
    trust = channel_credentials(guarded.trust("client"))
    assert trust is not None
    credentials = PeerCredentials(trust.tls, token_files.shows(token))
    async with open_channel(guarded.suite.address(service), credentials, callee=service) as channel:
        try:
            if service == "router":
                await router_pb2_grpc.RouterStub(channel).GetLoads(router_pb2.GetLoadsRequest(), timeout=20)
            else:
                await worker_pb2_grpc.WorkerStub(channel).Control(worker_pb2.ControlRequest(), timeout=20)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error, service).kind
    return None


async def test_certificates_and_tokens_rotate_under_load_and_nothing_is_lost(guarded: Guarded) -> None:
    answered = 0
    over = asyncio.Event()

    async def client() -> None:
        nonlocal answered
        while not over.is_set():
            async with guarded.http() as http:  # a handshake each, as new clients make
                for _ in range(3):
                    await chat(http, f"{MARK}-prompt {secrets.token_hex(4)}", tokens=64)
                    answered += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(client())
        try:
            await asyncio.sleep(0.5)
            for _ in range(2):
                before = answered
                make(guarded.certificates, Options(renew=True))
                for step in ("prepare", "switch", "finish"):
                    guarded.make_tokens(step)
                    await asyncio.sleep(ROTATED_S)
                assert answered > before
            for service, address in ports(guarded):
                shown = await asyncio.to_thread(served, address, guarded.certificates)
                assert shown.split() == (guarded.certificates / f"{service}.pem").read_text().split()
        finally:
            over.set()
    assert "replica is down" not in "".join(guarded.suite.output)


async def test_files_that_vanish_or_break_under_load_cost_nothing(guarded: Guarded) -> None:
    kept, kept_tokens = (guarded.certificates.parent / name for name in ("kept", "kept-tokens"))
    shutil.copytree(guarded.certificates, kept)
    async with guarded.http() as http:
        for path in guarded.certificates.glob("*.key"):
            path.write_text("no key")
        shutil.copytree(guarded.tokens, kept_tokens)
        for path in guarded.tokens.glob("*/*"):
            path.unlink()
        (guarded.certificates / "router.pem").unlink()
        try:
            await asyncio.sleep(ROTATED_S)
            await asyncio.gather(*(chat(http, f"{MARK}-prompt {number}") for number in range(16)))
            # A call of its own, which shows a token that is read for it; chats use sessions that are open.
            detokenized = await http.post("/detokenize", json={"model": MODEL, "tokens": [65, 66]})
            assert detokenized.status_code == 200, detokenized.text
            async with httpx.AsyncClient(
                base_url=guarded.suite.url, verify=shows(kept, "client"), trust_env=False
            ) as fresh:
                assert (await fresh.get("/ready")).status_code == 200
        finally:
            shutil.copytree(kept, guarded.certificates, dirs_exist_ok=True)
            shutil.copytree(kept_tokens, guarded.tokens, dirs_exist_ok=True)
        await asyncio.sleep(ROTATED_S)
        await chat(http, f"{MARK}-prompt after")
    await said(guarded, "must be a certificate and its unencrypted key")
    await said(guarded, "cannot be read: No such file or directory. The previous content stays in use.")


async def said(guarded: Guarded, words: str) -> None:
    """Waits until the log has it; its lines pass through two pipes."""
    await until(lambda: words in "".join(guarded.suite.output), 30)


async def test_every_request_is_in_the_audit_log(guarded: Guarded) -> None:
    async with guarded.http() as http:
        messages = [{"role": "user", "content": f"{MARK}-prompt to audit"}]
        anthropic = {"model": MODEL, "messages": messages}
        endless = {"model": MODEL, "prompt": MARK, "stream": True, "max_tokens": 800, "ignore_eos": True}
        body = {"model": MODEL, "max_tokens": 7, "ignore_eos": True, "messages": messages}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        await http.post("/v1/chat/completions", json={**body, "model": "unknown"})
        await http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {MARK}-key"})
        await http.post("/v1/messages", json={**anthropic, "max_tokens": 5})
        kept = {"model": MODEL, "input": f"{MARK}-prompt", "max_output_tokens": 4}
        response = (await http.post("/v1/responses", json=kept)).json()
        assert (await http.get(f"/v1/responses/{response['id']}")).json()["id"] == response["id"]
        async with http.stream("POST", "/v1/completions", json=endless) as stream:
            await anext(stream.aiter_bytes())
        await http.get("/health")

        async def written() -> dict[tuple[str, str], dict[str, Any]]:
            await asyncio.sleep(0.1)
            lines = (await asyncio.to_thread(guarded.audit.read_text)).splitlines()
            return {(entry["path"], entry["outcome"]): entry for entry in map(json.loads, lines)}

        for _ in range(200):
            entries = await written()
            if ("/v1/completions", "cancelled") in entries:
                break
        chats = {outcome: entry for (path, outcome), entry in entries.items() if path == "/v1/chat/completions"}
        completed = chats["completed"]
        assert completed["request_id"] == answer["id"]
        assert (completed["model"], completed["status"], completed["output_tokens"]) == (MODEL, 200, 7)
        assert completed["prompt_tokens"] == answer["usage"]["prompt_tokens"]
        assert str(completed["workers"]).startswith("['worker-")
        assert completed["key"] == guarded.key_id
        assert chats["model_not_found"]["status"] == 404
        assert chats["invalid_api_key"]["status"] == 401
        assert {"request", "answer"}.isdisjoint(completed)
        assert entries["/v1/messages", "completed"]["output_tokens"] <= 5
        assert entries["/v1/responses", "completed"]["output_tokens"] <= 4
        for path, outcome in (("/v1/messages", "completed"), ("/v1/completions", "cancelled")):
            assert entries[path, outcome]["workers"], path
            assert entries[path, outcome]["prompt_tokens"] > 0, path
        assert not any(path == "/health" for path, _ in entries)


async def test_no_log_holds_a_prompt_a_key_or_a_token(guarded: Guarded) -> None:
    """The last test of this file: it reads what all of them have left behind."""
    async with guarded.http() as http:
        text = f"{MARK}-prompt that is refused"
        message = {"role": "user", "content": text}
        for path, body in (
            ("/v1/chat/completions", {"model": MODEL, "messages": [{**message, "role": text}]}),
            ("/v1/chat/completions", {"model": MODEL, "messages": [message], "max_tokens": text}),
            ("/v1/chat/completions", {"model": MODEL, "messages": [message], "chat_template": "{{ boom("}),
            ("/v1/chat/completions", {"model": MODEL, "messages": [message], "tools": [{"type": text}]}),
            ("/v1/completions", {"model": MODEL, "prompt": text, "max_tokens": 10**9}),
            ("/v1/completions", {"model": text, "prompt": text}),
            ("/v1/embeddings", {"model": MODEL, "input": text}),
            ("/tokenize", {"model": MODEL, "prompt": text}),
            ("/v1/chat/completions", text),
            ("/v1/messages", {"model": MODEL, "max_tokens": 5, "messages": [message], "system": [text]}),
            ("/v1/messages", {"model": MODEL, "max_tokens": 5, "messages": [{**message, "role": text}]}),
            ("/v1/responses", {"model": MODEL, "input": [{"role": text, "content": text}]}),
            ("/v1/responses", {"model": MODEL, "input": text, "previous_response_id": text}),
        ):
            await http.post(path, json=body)
        await http.post("/v1/chat/completions", content=text.encode(), headers={"content-type": "application/json"})
        await http.get(f"/v1/models/{MARK}?q={MARK}")
        async with http.stream(
            "POST",
            "/v1/completions",
            json={"model": MODEL, "prompt": text, "stream": True, "max_tokens": 800, "ignore_eos": True},
        ) as answer:
            await anext(answer.aiter_bytes())  # and gone
        await asyncio.sleep(1)
    said = [*guarded.suite.output, *(await asyncio.to_thread(guarded.audit.read_text)).splitlines()]
    assert any("DEBUG" in line for line in said)
    assert [line for line in said if guarded.key.partition(f"{guarded.key_id}-")[2] in line] == []
    assert [line for line in said if MARK in line and f"/v1/models/{MARK}" not in line] == []
    assert len(guarded.secrets) == 3 * 14, "the tokens of three generations"
    assert [line for line in said if any(secret in line for secret in guarded.secrets)] == []

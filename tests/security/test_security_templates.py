"""Templates and tokenizers that come from workers or clients harm neither the process nor its neighbours."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import psutil
import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.tasks import Stop
from services.common.child_rpc.child import ChildLimits
from services.common.discovery import tokenizer_check
from services.common.discovery.tokenizer_check import check_tokenizer
from services.common.discovery.tokenizer_store import TokenizerStore
from services.common.net.ports import free_port
from services.common.packages.model_files import ModelSpec
from services.common.rpc.channels import open_channel
from services.common.rpc.errors import from_rpc_error
from services.preprocess import __main__ as preprocess
from services.preprocess.contract.tokenizer import ChatRequest
from services.preprocess.limits import Limits
from services.preprocess.settings import PreprocessSettings
from services.preprocess.templates import templates
from services.preprocess.templates.child import job
from services.preprocess.templates.lane import GRACE_S
from services.preprocess.templates.processes import TemplateProcesses
from services.preprocess.tokenizers.hf import HfTokenizer
from services.preprocess.tokenizers.loading import load_tokenizer
from sluice.v1 import preprocess_pb2 as pb
from sluice.v1 import preprocess_pb2_grpc
from tests.support.data.big_vocabulary import build_big_model
from tests.support.data.loaded_tokenizers import limits, tiny_folder, tiny_hf
from tests.support.data.tiny_models import build_tiny_model
from tests.support.data.tokenizer_families import EXACT
from tests.support.servers.workers import hosted

CHAT = ChatRequest([{"role": "user", "content": "hi"}])
LIMIT_S = 0.5

# Small texts that make something huge in several steps: no check of a single one finds them.
NESTED = "{% set a = [1] * 999 %}{% set b = [a] * 999 %}{% set c = [b] * 999 %}"
NESTED_BOMBS = {
    "a list's text": NESTED + "{{ c | string | length }}",
    "a list's JSON": NESTED + "{{ c | tojson | length }}",
    "sums": "{% set x = 'a' * 4000000 %}{{ (" + " ~ ".join(["x"] * 400) + ") | length }}",
    "a slow filter": "{% set x = 'a b ' * 900000 %}{{ x | wordwrap(1) | length }}{{ x | wordwrap(2) | length }}",
}

ENDLESS_CALL = "{{ ([messages * 4000] * 4000) | sum(start=[]) | length }}"
"""Copies lists for minutes in one native call, which nothing interrupts."""


@pytest.fixture(scope="module")
def foreign() -> Iterator[TemplateProcesses]:
    made = TemplateProcesses(count=1, limit_s=LIMIT_S, max_chars=1 << 20, memory_mb=256, models=4)
    yield made
    made.close()


@pytest.fixture(scope="module")
def tight(foreign: TemplateProcesses) -> Limits:
    return Limits(1 << 20, LIMIT_S, foreign)


def learned(template: str, bounds: Limits, name: str = "m") -> HfTokenizer:
    """The tiny model as if a worker's card had brought a template."""
    spec = ModelSpec(name, str(tiny_folder()), chat_template=template, learned=True)
    tokenizer = load_tokenizer(spec, bounds)
    assert isinstance(tokenizer, HfTokenizer)
    return tokenizer


def test_a_template_of_a_workers_card_takes_no_memory_here_and_is_its_models_fault(tight: Limits) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tokenizer = learned("{{ 'a' | center(300000000) }}", tight)
    with pytest.raises(SluiceError) as caught:
        tokenizer.encode_chat(CHAT)
    tokenizer.close()
    assert (caught.value.kind, caught.value.code) == (ErrorKind.FAILED_PRECONDITION, "model_template_failed")
    assert "delivered by the workers of model m" in caught.value.message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


@pytest.mark.parametrize("source", NESTED_BOMBS.values(), ids=NESTED_BOMBS.keys())
def test_template_that_exhausts_its_process_is_refused_and_the_next_one_runs(source: str, tight: Limits) -> None:
    tokenizer = learned(source, tight)
    with pytest.raises(SluiceError) as caught:
        tokenizer.encode_chat(CHAT)
    assert (caught.value.kind, caught.value.code) == (ErrorKind.FAILED_PRECONDITION, "model_template_failed")
    with pytest.raises(SluiceError) as caught:
        tight.foreign_templates.render(source, {"messages": CHAT.messages})
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_ARGUMENT, "chat_template")
    assert tight.foreign_templates.render("{{ messages[0].content }}", {"messages": CHAT.messages}) == "hi"
    tokenizer.close()


def test_a_learned_model_gives_the_ids_of_a_configured_one_and_renders_nothing_here(
    tight: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = [
        CHAT,
        ChatRequest([{"role": "user", "content": "Grüße 😀"}, {"role": "assistant", "content": "It is"}],
                    continue_final_message=True),
        ChatRequest(CHAT.messages, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]),
    ]  # fmt: skip
    expected = [tiny_hf().encode_chat(chat) for chat in chats]

    def never(*_: Any) -> Any:
        raise AssertionError("rendered in this process")

    with monkeypatch.context() as patched:
        patched.setattr(templates, "render", never)
        patched.setattr(templates, "compiled", never)
        tokenizer = load_tokenizer(ModelSpec("t", str(tiny_folder()), learned=True), tight)
        assert [tokenizer.encode_chat(chat) for chat in chats] == expected
        assert tokenizer.facts.template_fingerprint == tiny_hf().facts.template_fingerprint
        with pytest.raises(SluiceError, match="rendered in this process"):
            load_tokenizer(ModelSpec("t", str(tiny_folder())), tight)
    tokenizer.close()


def test_a_learned_model_whose_template_is_not_jinja_is_not_loaded(tight: Limits) -> None:
    for template in ("{% if %}", "x" * (templates.MAX_TEMPLATE_CHARS + 1), "{% for a in [1] %}" * 50):
        with pytest.raises(SluiceError) as caught:
            learned(template, tight)
        assert caught.value.kind is ErrorKind.FAILED_PRECONDITION


def test_what_a_template_says_of_the_messages_stays_the_clients_fault(tight: Limits) -> None:
    tokenizer = learned("{{ raise_exception('roles must alternate' * 1000) }}", tight)
    with pytest.raises(SluiceError, match="rejects this conversation: roles must alternate") as caught:
        tokenizer.encode_chat(CHAT)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_ARGUMENT, "messages")
    assert len(caught.value.message) < 500
    tokenizer.close()


async def test_a_model_with_a_hostile_template_slows_no_other_model_and_not_the_event_loop() -> None:
    loop = asyncio.get_running_loop()
    foreign = TemplateProcesses(1, 1.0, 1 << 20, 256, models=4, wait_s=30.0, loop=loop)
    bounds = Limits(1 << 20, 1.0, foreign)
    honest = await asyncio.to_thread(learned, "{{ messages[0].content }}", bounds, "honest")
    # The first probe at load is killed, and no other one is rendered.
    hostile = await asyncio.to_thread(learned, ENDLESS_CALL, bounds, "hostile")

    async def ask(tokenizer: HfTokenizer) -> str:
        pending = tokenizer.begin_chat(CHAT)
        assert pending is not None
        return await pending.text()

    held = [asyncio.create_task(ask(hostile)) for _ in range(8)]
    refused = asyncio.gather(*held, return_exceptions=True)
    answered = 0
    while not refused.done():
        assert await ask(honest) == "hi"
        answered += 1
        await asyncio.sleep(0.01)
    assert answered > 0
    for error in await refused:
        assert isinstance(error, SluiceError)
        assert error.kind is ErrorKind.FAILED_PRECONDITION
    # What was killed several times is not started again at once: eight requests do not take eight times the limit.
    began = monotonic()
    with pytest.raises(SluiceError):
        await ask(hostile)
    assert monotonic() - began < 1.0, "refused without a process"
    await foreign.aclose()


async def test_there_are_no_more_processes_than_allowed_and_one_that_rests_makes_room() -> None:
    foreign = TemplateProcesses(1, 2.0, 1 << 20, 256, models=2, loop=asyncio.get_running_loop())
    runners = [foreign.of_model(str(number)) for number in range(6)]
    before = len(psutil.Process().children(recursive=True))
    for runner in (*runners, *runners):
        assert await runner.prepare("{{ messages[0].content }}", {"messages": CHAT.messages})() == ("hi", ())
        assert len(psutil.Process().children(recursive=True)) - before <= 1 + 2 + 1, "one of them may still be ending"
    many = await asyncio.gather(
        *(runner.prepare("{{ messages[0].content }}", {"messages": CHAT.messages})() for runner in runners * 5)
    )
    assert set(many) == {("hi", ())}
    await foreign.aclose()


async def test_a_process_that_a_template_has_taken_over_says_nothing_that_is_believed() -> None:
    foreign = TemplateProcesses(1, 2.0, 1 << 20, 256, loop=asyncio.get_running_loop())
    runner = foreign.of_model("m")
    ask = runner.prepare("{{ messages[0].content }}", {"messages": CHAT.messages})
    assert await ask() == ("hi", ())
    (lane,) = foreign._models
    for reply in (b"\1unasked", b"\7", b"", b"\2no json", b'\2{"message": 99}', b"\1\xff\xff\xff\xff"):
        assert lane.child is not None
        assert lane.child.on_frame is not None
        lane.child.on_frame(reply)
        assert await ask() == ("hi", ()), "the next request has a process of its own"
    await foreign.aclose()


HUGE = {
    "center": "{{ 'a' | center(10 ** 9) }}",
    "center as a method": "{{ 'a'.center(10 ** 9) }}",
    "ljust": "{{ 'a'.ljust(10 ** 9) }}",
    "rjust": "{{ 'a'.rjust(10 ** 9, 'x') }}",
    "zfill": "{{ '1'.zfill(10 ** 9) }}",
    "expandtabs": "{{ ('\t' * 1000).expandtabs(10 ** 6) }}",
    "an operator's width": "{{ '%1000000000d' % 1 }}",
    "a width that is given": "{{ '%*d' % (10 ** 9, 1) }}",
    "a precision": "{{ '%.1000000000f' % 1.5 }}",
    "an operator's values": "{{ ('%s' * 3000) % (('a' * 4000,) * 3000) }}",
    "a format's width": "{{ '{:1000000000}'.format(1) }}",
    "a width inside a format": "{{ '{:{}}'.format(1, 1000000000) }}",
    "a map's width": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "a format's values": "{{ ('{0}' * 3000).format('a' * 4000) }}",
    "format": "{{ '%1000000000d' | format(1) }}",
    "a product": "{{ 'a' * 10 ** 9 }}",
    "a list's product": "{{ [1] * 10 ** 9 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "join": "{{ range(99999) | join('a' * 4000) }}",
    "join as a method": "{{ ('a' * 4000).join(range(99999) | map('string')) }}",
    "replace": "{{ ('a' * 4000) | replace('a', 'b' * 4000) }}",
    "replace as a method": "{{ ('a' * 4000).replace('', 'b' * 4000) }}",
    "translate": "{{ ('a' * 4000).translate({97: 'b' * 4000}) }}",
    "indent": "{{ ('\n' * 4000) | indent(10 ** 6, blank=true) }}",
    "indent by a text": "{{ ('\n' * 4000) | indent('a' * 4000, blank=true) }}",
    "batch": "{{ [1] | batch(10 ** 9, 0) | list }}",
    "slice": "{{ [1] | slice(10 ** 9) | list }}",
    "wordwrap": "{{ ('a' * 4000) | wordwrap(1, wrapstring='b' * 4000) }}",
    "tojson": "{{ [[[1]]] | tojson(indent=10 ** 9) }}",
    "tojson by a text": "{{ [[[1] * 4000]] | tojson(indent='a' * 4000) }}",
    "round": "{{ 1 | round(10 ** 9, 'ceil') }}",
    "sum": "{{ ([[1] * 4000] * 4000) | sum(start=[]) | length }}",
    "urlize": "{{ ('http://a.example ' * 4000) | urlize(target='a' * 4000) }}",
    "a number's bytes": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "range": "{{ range(10 ** 9) | list }}",
    "lipsum": "{{ lipsum(10 ** 9) }}",
    "a date": "{{ strftime_now('%Y' * 1000000) }}",
    "a namespace": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a block": "{% set x = 'aa' %}" + "{% set x %}{{ x }}{{ x }}{{ x }}{{ x }}{% endset %}" * 20,
    "a filtered block": "{% set x = 'aa' %}" + "{% set x | upper %}{{ x }}{{ x }}{{ x }}{{ x }}{% endset %}" * 20,
    "lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "macros": "{% macro d(x) %}{{ x }}{{ x }}{{ x }}{{ x }}{% endmacro %}{{ " + "d(" * 15 + "'aa'" + ")" * 15 + " }}",
    "a filter by name": "{{ ['a'] | map('center', 10 ** 9) | list }}",
    "a method by name": "{{ ('a' | attr('center'))(10 ** 9) }}",
}


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE.keys())
def test_template_that_multiplies_is_refused_in_time_and_takes_no_memory_here(
    source: str, foreign: TemplateProcesses
) -> None:
    variables = {"messages": CHAT.messages}
    assert foreign.render("{{ messages[0].content }}", variables) == "hi"  # the process runs
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, monotonic()
    with pytest.raises(SluiceError) as caught:
        foreign.render(source, variables)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_ARGUMENT, "chat_template")
    assert foreign.render("{{ messages[0].content }}", variables) == "hi"
    assert monotonic() - began < 10 * LIMIT_S + 2 * GRACE_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10


async def test_renders_beside_templates_that_end_their_process_are_all_answered() -> None:
    foreign = TemplateProcesses(1, LIMIT_S, 1 << 20, 256, loop=asyncio.get_running_loop())
    hostile = (
        HUGE["a product"],
        HUGE["lists"],
        NESTED_BOMBS["a list's text"],
        "{% set x = 'a' | center(10 ** 8) %}{{ x | length }}",
    )
    chat = job({"messages": CHAT.messages}, None)
    calls = [
        foreign.of_client(source, chat, origin)
        for number in range(8)
        for origin, source in (("hostile", hostile[number % 4]), ("honest", "{{ messages[0].content }}" + " " * number))
    ]
    results = await asyncio.gather(*calls, return_exceptions=True)
    await foreign.aclose()
    assert [getattr(result, "text", result) for result in results[1::2]] == ["hi" + " " * number for number in range(8)]
    refused = [result for result in results[::2] if isinstance(result, SluiceError)]
    assert {error.param for error in refused} == {"chat_template"}
    assert len(refused) >= 6


async def test_render_in_a_process_whose_memory_earlier_templates_used_up_is_retried_in_another() -> None:
    foreign = TemplateProcesses(1, 10.0, 1 << 20, 256, loop=asyncio.get_running_loop())
    chat = job({"messages": CHAT.messages}, None)
    greedy, honest = (
        "{% set x = 'a' | center(10000000) %}{{ x | length }}",
        "{{ (messages[0].content * 40000000) | length }}",
    )
    processes = set()
    try:
        for number in range(16):  # the compiler folds a constant of 10 MB, which stays in the cache of templates
            assert (await foreign.of_client(greedy + " " * number, chat, "greedy")).text.strip() == "10000000"
            assert (await foreign.of_client(honest, chat, "honest")).text == "80000000"
            processes.add(foreign._clients[0].child)
    finally:
        await foreign.aclose()
    assert len(processes) > 1, "one process has not enough memory for all"


# --- what else is in a delivered folder ---


def pipeline(**changes: Any) -> dict[str, Any]:
    """The tiny tokenizer's content with some of it replaced."""
    content: dict[str, Any] = json.loads((tiny_folder() / "tokenizer.json").read_text())
    return {**copy.deepcopy(content), **changes}


def with_model(**changes: Any) -> dict[str, Any]:
    content = pipeline()
    return {**content, "model": {**content["model"], **changes}}


def charsmap(text: bytes) -> str:
    return base64.b64encode((4).to_bytes(4, "little") + b"\0" * 4 + text + b"\0").decode()


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 60}
BOMBS: dict[str, Callable[[], dict[str, Any]]] = {
    "a text that grows": lambda: pipeline(normalizer={**REPLACE, "content": "a" * 100_000}),
    "steps that multiply": lambda: pipeline(normalizer={"type": "Sequence", "normalizers": [REPLACE] * 6}),
    "a decoder that grows": lambda: pipeline(decoder={**REPLACE, "content": "a" * 100_000}),
    "too many steps": lambda: pipeline(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 1000}),
    "a long pattern": lambda: pipeline(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a" * 9999}, "behavior": "Isolated", "invert": False}
    ),
    "a map of characters": lambda: pipeline(
        normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap(b"x" * 100_000)}
    ),
    "a huge id": lambda: with_model(vocab={**pipeline()["model"]["vocab"], "zz": 2**31 - 1}),
    "a huge added id": lambda: pipeline(added_tokens=[{**pipeline()["added_tokens"][0], "id": 2**31 - 1}]),
    "long words": lambda: pipeline(
        model={"type": "WordPiece", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]", "max_input_chars_per_word": 10**9}
    ),
    "no vocabulary": lambda: pipeline(model={"type": "BPE"}),
    "much beside it": lambda: pipeline(more=[[]] * (4 << 20)),
    "much inside it": lambda: with_model(more=[[]] * (4 << 20)),
    "much in a token": lambda: pipeline(added_tokens=[{**pipeline()["added_tokens"][0], "more": [[]]}]),
    "no library reads it": lambda: pipeline(model={"type": "New", "vocab": {"a": 0}}),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_a_tokenizer_that_could_blow_up_is_refused_before_it_is_loaded(
    bomb: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder(), folder)
    (folder / "tokenizer.json").write_text(json.dumps(bomb()))
    with pytest.raises(SluiceError, match="tokenizer was rejected") as caught:
        check_tokenizer(folder)
    assert (caught.value.kind, caught.value.code) == (ErrorKind.INVALID_ARGUMENT, "bad_tokenizer")


def test_a_large_file_beside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder(), folder)
    (folder / "config.json").write_bytes(b'{"a": [' + b"[]," * (4 << 20) + b"[]]}")
    with pytest.raises(SluiceError, match=r"config\.json is larger than 8 MiB"):
        check_tokenizer(folder)


def test_one_that_takes_too_much_memory_ends_only_the_process_that_looks_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_tokenizer(build_tiny_model(tmp_path))
    monkeypatch.setattr(tokenizer_check, "MEMORY_BYTES", 32 << 20)
    with pytest.raises(SluiceError, match="tokenizer was rejected"):
        check_tokenizer(tmp_path)


@pytest.mark.parametrize("name", [*EXACT, "big"])
def test_usual_tokenizers_pass(name: str, tmp_path: Path) -> None:
    check_tokenizer({**EXACT, "big": build_big_model}[name](tmp_path))


def test_code_beside_a_tokenizer_is_neither_kept_nor_run(tmp_path: Path) -> None:
    store = TokenizerStore(tmp_path / "cache")
    for name in ("tokenization_evil.py", "evil.so", "pytorch_model.bin", "sub/tokenizer.json", "../tokenizer.json"):
        incoming = store.receive("0" * 64)
        with pytest.raises(SluiceError, match="name is not allowed"):
            incoming.add(name, 1, b"x")
        incoming.drop()
    incoming = store.receive("0" * 64)
    for name in ("tekken_own.json", "config.json"):  # a name of its own is for a tokenizer that is a single file
        incoming.add(name, 2, b"{}")
    with pytest.raises(SluiceError, match="name is not allowed"):
        incoming.keep()
    folder = build_tiny_model(tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('executed')")
    assert load_tokenizer(ModelSpec("m", str(folder), learned=True), limits()).encode_chat(CHAT)
    assert "evil" not in sys.modules


def test_values_that_no_model_has_are_left_out(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [-1, True, 2**40, "x", 1, 2, *range(1000)], "temperature": 1e9, "top_k": 2**80})
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2**70, "vocab_size": 2**70}))
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer_config, "pad_token": "x" * 10**6}))
    tokenizer = HfTokenizer(folder, limits())
    facts = tokenizer.facts
    assert len(facts.eos_ids) == 64
    assert all(0 <= token < 2**31 for token in facts.eos_ids)
    assert (facts.defaults.temperature, facts.defaults.top_k) == (None, None)
    assert facts.vocab_size == tiny_hf().facts.vocab_size
    assert facts.context_length < 10**9
    template = ChatRequest(CHAT.messages, chat_template="{{ pad_token is defined }}")
    assert tokenizer.render(template) == "False", "a text that would travel with every chat"


HUNGRY = """
import sys, types
services = types.ModuleType("services")
services.__path__ = [sys.argv[1]]
sys.modules["services"] = services
from services.preprocess.engines import host
from services.preprocess.engines.tokenizer import EngineFacts
module = types.ModuleType("services.preprocess.engines.hungry")
class Tokenizer:
    facts = EngineFacts("1", 256, (2,), 0, "", True)
    def __init__(self, path):
        self.taken = bytearray(1 << 30)
module.Tokenizer = Tokenizer
sys.modules["services.preprocess.engines.hungry"] = module
host.main(sys.argv[2:])
"""


@pytest.mark.parametrize("foreign_files", [True, False])
def test_an_engines_process_is_limited_while_it_loads_foreign_files(foreign_files: bool, tmp_path: Path) -> None:
    services = Path(preprocess.__file__).parents[1]
    limits = ChildLimits(memory_mb=256, alarm_s=5)
    arguments = ["hungry", str(tmp_path), str(limits), str(tmp_path), *(["foreign"] if foreign_files else [])]
    done = subprocess.run(
        [sys.executable, "-c", HUNGRY, str(services), *arguments],
        input=b"", capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    hello = json.loads(done.stdout[4:])
    assert ("too much memory" in hello.get("error", {}).get("message", "")) is foreign_files
    assert ("facts" in hello) is not foreign_files


# --- as it is deployed ---


@asynccontextmanager
async def serving(*flags: str) -> AsyncIterator[preprocess_pb2_grpc.PreprocessAsyncStub]:
    listen, stop = f"127.0.0.1:{free_port()}", Stop()
    settings = PreprocessSettings.load(["--listen", listen, "--drain-s", "0", *flags])
    task = asyncio.ensure_future(preprocess.serve(settings, stop))
    channel = open_channel(listen)
    try:
        await asyncio.wait_for(channel.channel_ready(), 60)
        yield preprocess_pb2_grpc.PreprocessStub(channel)
    finally:
        await channel.close()
        stop.set()
        await task


async def test_a_worker_that_brings_a_hostile_template_fails_its_own_chats_only(tmp_path: Path) -> None:
    card = tmp_path / "card.jinja"
    card.write_text("{{ 'a' | center(1500000000) }}")
    request = pb.ChatInput(messages_json=b'[{"role": "user", "content": "hi"}]')
    async with (
        hosted(tiny_folder(), model=f"evil={tiny_folder()}", chat_template=card) as evil,
        hosted(tiny_folder(), model=f"good={tiny_folder()}") as good,
        serving(
            *("--workers", ",".join(f"127.0.0.1:{host.server.port}" for host in (evil, good))),
            *("--tokenizer-cache", str(tmp_path / "cache")),
        ) as stub,
    ):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(pb.TokenizeRequest(model="evil", chat=request), timeout=120)
        error = from_rpc_error(caught.value, "preprocess")
        assert (error.kind, error.code) == (ErrorKind.FAILED_PRECONDITION, "model_template_failed")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
        reply = await stub.Tokenize(pb.TokenizeRequest(model="good", chat=request), timeout=120)
        (text,) = [(await stub.Render(pb.RenderRequest(model="good", chat=request), timeout=120)).text]
        assert list(memoryview(reply.token_ids).cast("I")) == tiny_hf().encode_chat(CHAT)
        assert text == tiny_hf().render(CHAT)
        own = pb.ChatInput(messages_json=request.messages_json, chat_template=NESTED_BOMBS["a list's text"])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(pb.TokenizeRequest(model="good", chat=own), timeout=120)
        error = from_rpc_error(caught.value, "preprocess")
        assert (error.kind, error.param) == (ErrorKind.INVALID_ARGUMENT, "chat_template")

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from typing import Any

import psutil
import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.preprocess.templates import templates
from services.preprocess.templates.processes import TemplateProcesses
from tests.support.oracles.errors import raises_error

MESSAGES = [{"role": "user", "content": "a<b> & ü"}]


def run(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    variables["messages"] = messages or MESSAGES
    return templates.render(source, variables, limit_s=5.0, max_chars=100_000).text


@pytest.fixture(scope="module")
def processes() -> Iterator[TemplateProcesses]:
    made = TemplateProcesses(count=1, limit_s=0.5, max_chars=100_000, memory_mb=256)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "a<b> & ü"}'),
        ("{{ {'b': 1, 'a': [1.0]} | tojson(indent=2, sort_keys=true) }}", '{\n  "a": [\n    1.0\n  ],\n  "b": 1\n}'),
        ("{{ messages[0].content }}", "a<b> & ü"),
        ("{% if true %}\n  x\n{% endif %}\ny", "  x\ny"),
        ("  {% if true %}x{% endif %}", "x"),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% generation %}{% set x = 1 %}a{% endgeneration %}{{ x is defined }}", "aFalse"),
        ("{{ missing }}{{ tools is none }}", "True"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
    ],
)
def test_templates_run_as_models_expect(source: str, expected: str) -> None:
    assert run(source, tools=None) == expected


@pytest.mark.parametrize(
    ("source", "param", "sentence"),
    [
        ("{% if %}", "chat_template", "syntax error in line 1"),
        ("{{ 1 }\n{% endfor %}", "chat_template", "syntax error"),
        ("{{ a.b.c }}", "chat_template", "'a' is undefined"),
        ("{{ raise_exception('roles must alternate') }}", "messages", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "chat_template", "unsafe"),
        ("{{ messages.append(1) }}", "chat_template", "unsafe"),
        ("{{ 1 / 0 }}", "chat_template", "division by zero"),
        ("{{ 'x' + 1 }}", "chat_template", "failed on this conversation"),
        ("{% include 'etc' %}", "chat_template", "failed on this conversation"),
        ("{% for i in range(10**12) %}{% endfor %}", "chat_template", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat_template", "recurses too deeply"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "chat_template", "nested too deeply"),
        ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "chat_template", "nested too deeply"),
        ("{% for i in range(99999) %}{{ 'aaaaaaaaaa' }}{% endfor %}", "chat_template", "more than 100,000 characters"),
        ("x" * (templates.MAX_TEMPLATE_CHARS + 1), "chat_template", "longer than"),
    ],
)
def test_a_bad_template_is_one_sentence(source: str, param: str, sentence: str) -> None:
    with pytest.raises(SluiceError) as caught:
        run(source)
    assert sentence in caught.value.message
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_ARGUMENT, param)


def test_a_template_that_keeps_emitting_is_given_up() -> None:
    slow = "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
    with pytest.raises(SluiceError, match=r"did not finish within 0\.1 s"):
        templates.render(slow, {"messages": MESSAGES}, limit_s=0.1, max_chars=1000)


PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content }}", "a\nb"),
        ("{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}", "[a][b]"),
        ("{% for m in messages %}{% for p in m['content'] | list %}[{{ p.text }}]{% endfor %}{% endfor %}", "[a][b]"),
        ("{% set c = messages[0]['content'] %}{% for p in c %}[{{ p.text }}]{% endfor %}", "[a][b]"),
    ],
)
def test_content_parts_reach_templates_that_iterate_them(source: str, expected: str) -> None:
    assert run(source, PARTS) == expected


def test_arguments_reach_templates_as_objects_and_missing_content_as_nothing() -> None:
    def message(arguments: Any) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": arguments}}]}]

    source = "{{ messages[0].content }}{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert run(source, message('{"a": "ü"}')) == '{"a": "ü"}'
    assert run(source, message({"a": 1})) == '{"a": 1}'
    assert run(source, message("")) == "{}"
    assert run(source, message("{broken")) == '{"raw_arguments": "{broken"}'


def test_a_process_gives_the_same_as_this_one(processes: TemplateProcesses) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m | tojson }}{% endfor %}{{ extra }}"
    for extra in ("ü", "😀"):
        assert processes.render(source, {"messages": MESSAGES, "extra": extra}) == run(source, extra=extra)
    with raises_error(param="messages"):
        processes.render("{{ raise_exception('no') }}", {"messages": MESSAGES})


HOSTILE = {
    "spins": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "doubles": "{% set n = namespace(x='aa') %}{% for i in range(999) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "repeats": "{{ 'a' * 10 ** 12 }}",
    "pads": "{{ 'a' | center(10 ** 11) }}",
    "formats": "{{ '%9999999999d' % 1 }}",
    "babbles": "{{ lipsum(10 ** 9) }}",
    "repeats from the right": "{{ 10 ** 12 * 'ab' }}",
    "repeats a list": "{% set n = 10 ** 12 %}{{ [1] * n }}",
    "power of a float": "{{ 2.0 ** 9999 }}",
    "recurses": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_ends_in_bounded_time_and_the_next_one_runs(
    processes: TemplateProcesses, source: str
) -> None:
    started = monotonic()
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="chat_template"):
        processes.render(source, {"messages": MESSAGES})
    assert monotonic() - started < 20  # a generous bound: without one these run for hours
    assert processes.render("{{ messages[0].role }}", {"messages": MESSAGES}) == "user"


def test_closed_processes_are_gone() -> None:
    made = TemplateProcesses(count=1, limit_s=5.0, max_chars=100, memory_mb=256)
    before = _children()
    assert made.render("x", {"messages": MESSAGES}) == "x"
    own = _children() - before
    assert len(own) == 2, "one that has Jinja loaded, and its copy"
    made.close()
    _, alive = psutil.wait_procs(list(own), timeout=30)
    assert not alive
    with pytest.raises(SluiceError, match="is stopping"):
        made.render("x", {"messages": MESSAGES})


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


ENDLESS = {
    "spins": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "spins in a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "spins in a call": "{% macro f() %}{% for i in range(9999) %}{{ caller() }}{% endfor %}{% endmacro %}"
    "{% call f() %}{% for i in range(9999) %}{% endfor %}{% endcall %}",
    "spins on content": "{% if messages[0].content %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_endless_template_is_interrupted_and_its_process_runs_on(processes: TemplateProcesses, source: str) -> None:
    assert processes.render("{{ messages[0].role }}", {"messages": MESSAGES}) == "user"
    before = _children()
    with raises_error(match=r"did not finish within 0\.5 s", kind=ErrorKind.INVALID_ARGUMENT, param="chat_template"):
        processes.render(source, {"messages": MESSAGES})
    assert processes.render("{{ messages[0].role }}", {"messages": MESSAGES}) == "user"
    assert _children() == before


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_template_does_not_get_out_of_the_sandbox(source: str) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="chat_template") as caught:
        run(source)
    assert "root:" not in caught.value.message


FORMS = {
    "string": "{% for m in messages %}{{ m.content }}|{% endfor %}",
    "parts": "{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}",
    "either": "{% for m in messages %}{% set c = m['content'] %}{% if c is string %}{{ c }}|{% else %}"
    "{% for p in c %}{{ p.text }}|{% endfor %}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("form", FORMS)
def test_content_has_the_form_that_the_template_is_written_for(form: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts}, {"role": "user", "content": "c"}]
    text = run(FORMS[form], messages)
    assert text == ("a\nb|c|" if form == "string" else "a|b|c|")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_earlier_turns_has_the_name_that_the_template_reads(name: str) -> None:
    message = {"role": "assistant", "content": "x", name: "hm"}
    for read in ("reasoning", "reasoning_content"):
        assert run("{{ messages[0][read] }}", [message], read=read) == "hm"


def test_parallel_calls_and_their_results_reach_the_template() -> None:
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": f"f{i}", "arguments": {"a": i}}} for i in (1, 2)]
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "content": f"r{i}", "tool_call_id": f"c{i}"} for i in (1, 2)),
    ]
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }}={{ c.function.name }}"
        "({{ c.function.arguments.a }});{% endfor %}{% if m.role == 'tool' %}{{ m.tool_call_id }}:{{ m.content }};"
        "{% endif %}{% endfor %}"
    )
    assert run(source, messages) == "c1=f1(1);c2=f2(2);c1:r1;c2:r2;"


@pytest.mark.parametrize(
    "call",
    [
        "render(m.content)",
        "render(content=m.content)",
        "render(m['content'] | default(''))",
        "render(m.get('content'))",
    ],
)
def test_parts_are_passed_to_a_template_whose_macro_iterates_over_content(call: str) -> None:
    """As the templates of Qwen3.5, Step-3.5 and Reka Edge do."""
    macro = (
        "{% macro render(content) %}{% if content is string %}{{ content }}{% else %}"
        "{% for part in content %}[{{ part.text }}]{% endfor %}{% endif %}{% endmacro %}"
    )
    source = macro + "{% for m in messages %}{{ " + call + " }}{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}, {"role": "user", "content": parts}]
    assert run(source, messages) == "x[a][b]"


def test_macro_that_gets_no_content_changes_no_form() -> None:
    source = (
        "{% macro names(content) %}{% for part in content %}{{ part }}{% endfor %}{% endmacro %}"
        "{{ names(names_of) }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert run(source, PARTS, names_of=["t"]) == "ta\nb"

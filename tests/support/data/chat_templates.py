"""Chat templates of our own, each with one habit of published ones that a conversation has to be fitted to."""

from __future__ import annotations

_CALLS = (
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>{% endfor %}"
)
_TURN = "<{{ m.role }}>{{ m.content }}" + _CALLS + "</{{ m.role }}>"
_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
_LOOP = "{% for m in messages %}"
_END = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"

TEMPLATES = {
    "any_role": _TOOLS + _LOOP + _TURN + _END,
    "known_roles": _TOOLS
    + _LOOP
    + "{% if m.role in ('system', 'user', 'assistant', 'tool') %}"
    + _TURN
    + "{% endif %}"
    + _END,
    "developer": _TOOLS
    + _LOOP
    + "{% if m.role == 'developer' %}<instructions>{{ m.content }}</instructions>{% else %}"
    + _TURN
    + "{% endif %}"
    + _END,
    "system_first": _TOOLS
    + _LOOP
    + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}"
    "{% elif m.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('Which role?') }}{% endif %}"
    + _TURN
    + _END,
    "first_system_only": _TOOLS
    + "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}</system>{% endif %}"
    + _LOOP
    + "{% if m.role in ('user', 'assistant', 'tool') %}"
    + _TURN
    + "{% endif %}"
    + _END,
    "last_system_only": "{% set ns = namespace(system='') %}"
    + _LOOP
    + "{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}<system>{{ ns.system }}"
    + _LOOP
    + "{% if m.role != 'system' %}"
    + _TURN
    + "{% endif %}"
    + _END,
    "no_system": _LOOP + "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<{{ 'model' if m.role == 'assistant' else m.role }}>{{ m.content | trim }}" + _END,
    "alternating": "{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
    + _TOOLS
    + _LOOP
    + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('Only user and assistant roles') }}{% endif %}"
    "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('IDs have length 9') }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% if not c.id or c.id | length != 9 %}{{ raise_exception('IDs have length 9') }}"
    "{% endif %}{% endfor %}{% if m.role == 'assistant' and not m.content and not m.tool_calls %}"
    "{{ raise_exception('Assistant message must have content or calls') }}{% endif %}" + _TURN + _END,
    "ids_only": _TOOLS
    + _LOOP
    + "<{{ m.role }}>{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c['id'] + ' ' }}{{ c.function.arguments | tojson }}</call>{% endfor %}"
    + _END,
    "thinking": "{% for t in tools or [] %}{{ t.function.name + ': ' + t.function.description }}{% endfor %}"
    "{% if messages[0].role in ('system', 'developer') %}<system>{{ messages[0].content }}</system>{% endif %}"
    + _LOOP
    + "{% if m.role == 'assistant' and m.tool_calls %}{% if m.content and m.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}<analysis>{{ m.content or m.thinking }}"
    "{% set c = m.tool_calls[0] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% elif m.role != 'system' and m.role != 'developer' %}<{{ m.role }}>{{ m.content }}{% endif %}" + _END,
    "null_content": "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}<call>{{ c.function.name + c.function.arguments }}{% endfor %}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}" + _END,
    "single_call": _TOOLS
    + _LOOP
    + "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('Only one call!') }}{% endif %}"
    "<assistant>" + _CALLS + "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}" + _END,
    "objects_only": "{% for t in tools or [] %}{{ t.function.name }}"
    "{% for n, p in t.function.parameters.properties | items %}{{ n }}{% endfor %}{% endfor %}"
    + _LOOP
    + "<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{% for n, v in c.function.arguments | items %}"
    "{{ n }}={{ v }}{% endfor %}{% endfor %}" + _END,
    "no_tools": "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>{{ m.content }}"
    "{% endif %}" + _END,
    "parts": _TOOLS + _LOOP + "<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}" + _CALLS + _END,
}

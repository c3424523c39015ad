"""Answers of families of models as they write them, and pieces of their markup."""

from __future__ import annotations

from services.postprocess.parsers.families.dsml import DsmlParser
from services.postprocess.parsers.families.gemma import QUOTE
from services.postprocess.parsers.families.kimi_k3 import KimiK3Parser
from services.postprocess.parsers.families.minimax_m3 import NAMESPACE, MiniMaxM3Parser
from services.postprocess.parsers.families.step3 import Step3Parser
from tests.support.data.call_formats import minimax_m3_element as _element

_M3_END = f"{NAMESPACE}</invoke>"
_M3_CITY = f"{NAMESPACE}<city>Zürich 🌧️\n\nx{NAMESPACE}</city>"
_ARRAY = (
    '{"name": "get_weather", "arguments": {"city": "Zürich 🌧️\\n\\"x\\" {}", "days": [1, 2.5e3, true, null]}}, '
    '{"name": "f", "arguments": {}}'
)
_ARRAY_FRAGMENTS = ('[{"name": "g", "arguments": {}}', "]", '"name": "f"')

EXAMPLES: dict[tuple[str, str], tuple[str, ...]] = {
    ("deepseek_v32", "think"): (
        '<think>\nHm 🤔\n</think>Look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Zürich "🌧️"\n\nx</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[1, 2.5e3]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="city" string="false">null'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="city">7</｜DSML｜parameter></｜DSML｜invoke> more',
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="city" string="true">cut',
        'Look.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n'
        '<｜DSML｜ parameter name="city" string="true">Zürich</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n'
        '</｜DSML｜ invoke>\n<｜DSML｜ invoke name="f">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="arguments" string="false">{"city": "x"}</｜DSML｜parameter>'
        "</｜DSML｜invoke>",
    ),
    ("gemma4", "gemma4"): (
        '<|channel>thought\nHm 🤔\n<channel|>Look.\n<|tool_call>call:get_weather{city:<|"|>Zürich "🌧️"\n{x}, y:1'
        '<|"|>,days:3,deep:{a:{},b:[1,-2.5e3,true,null,<|"|>z<|"|>]}}<tool_call|><|tool_call>call:f{}<tool_call|>',
        "<|tool_call>call:g{word:Some words,ok:false}<tool_call|> done",
        '<|tool_call>call:get_weather{\'city\': "Zürich, it\'s } \\u00e9\\n🌧️", "days":3,'
        'ids:[\'x1\',"y, z"],o:{"k": 1}}<tool_call|> done',
        "thought\nHm\n<channel|><|tool_call>:f{city:90210}<tool_call|>",
        '<|tool_call>call:get_weather(city="x")<tool_call|><|tool_call>call:g{n:1}<tool_call|>',
        "<|tool_call>call:f{city:}<tool_call|> more",
        "<|tool_call>no call<tool_call|> more",
        '<|tool_call>call:f{city:<|"|>cut',
    ),
    ("kimi_k3", "kimi_k3"): (
        "<|open|>think<|sep|>Hm 🤔<|close|>think<|sep|><|open|>response<|sep|>Look.<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" '
        'type="string"<|sep|>Zürich "🌧️"\n\nx<|close|>argument<|sep|><|open|>argument key="days" type="array"<|sep|>'
        '[1, 2.5e3]<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="f" index="2"<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        '<|open|>call tool="f" index="1"<|sep|>{"city": "Zürich 🌧️", "a": {"b": []}}<|close|>call<|sep|>',
        "<|open|>response<|sep|>It rains.<|close|>response<|sep|>",
        '<|open|>call tool="f"<|sep|><|open|>argument key="city"<|sep|>7<|close|>argument<|sep|>'
        "<|close|>call<|sep|> more",
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>cut',
    ),
    ("minimax_m3", "minimax_m3"): (
        f'<mm:think>Hm 🤔</mm:think>Look.\n{NAMESPACE}<tool_call>\n{NAMESPACE}<invoke name="get_weather">\n{_M3_CITY}\n'
        f"{_element('days', 3)}\n{_element('deep', {'a': [{'b': 1}, {'b': 2}], 'c': {}})}\n{_M3_END}\n"
        f'{NAMESPACE}<invoke name="f">\n{_M3_END}\n{NAMESPACE}</tool_call>',
        f'{NAMESPACE}<invoke name="g">{_element("x", "1")}{_element("x", "2")}{_M3_END} done',
        f'{NAMESPACE}<invoke name="f">{NAMESPACE}<city>oops{NAMESPACE}</town>{_M3_END} more',
        f'{NAMESPACE}<tool_call>{NAMESPACE}<invoke name="f">{NAMESPACE}<city>cut',
    ),
    ("seed_oss", "seed_oss"): (
        "<seed:think>Hm 🤔</seed:think>Look.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Zürich 🌧️"
        "</parameter>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call> done",
        "<seed:tool_call>\n<function=f>\n<parameter=city>cut",
        "Write <seed:tool_call> in your prompt.",
    ),
    ("step3", "think"): (
        "<think>Hm</think>Look.<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="get_weather">\n<steptml:parameter name="city">Zürich 🌧️</steptml:parameter>\n'
        '<steptml:parameter name="days">3</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f"></steptml:invoke><｜tool_call_end｜>'
        "<｜tool_calls_end｜>",
        '<steptml:invoke name="f"><steptml:parameter nam="a">1</steptml:parameter></steptml:invoke> more',
        "<｜tool_calls_begin｜><｜tool_call_begin｜>no call",
    ),
    ("hy_v3", "think"): (
        "<think>Hm</think>Look.\n<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n"
        "<arg_value>Zürich 🌧️</arg_value>\n<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>\n"
        "<tool_call>f<tool_sep>\n</tool_call>\n</tool_calls>",
        "<tool_call>f<tool_sep><arg_key>a</arg_key>oops</tool_call> more",
        "<tool_calls><tool_call>f<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>cut",
    ),
    ("cohere_command3", "cohere_command3"): (
        "<|START_THINKING|>Hm 🤔<|END_THINKING|>"
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather",  '
        '"parameters": {"city": "Zürich 🌧️", "days": [1, 2.5]}},\n    {"tool_call_id": "1", "tool_name": "f", '
        '"parameters": {}}\n]<|END_ACTION|>',
        "<|START_THINKING|>Hm<|END_THINKING|><|START_RESPONSE|>It rains.<|END_RESPONSE|>",
        '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": oops}}]<|END_ACTION|> more',
        "<|START_ACTION|>nothing<|END_ACTION|> more",
    ),
    ("phi4_mini_json", ""): (
        f"Look. functools[{_ARRAY}]",
        'functools[{"name": "f", "arguments": {"a": oops}}] more',
        "the module functools, and functools[0]",
        'functools[{"name": "f", "arguments": {"a": "cut',
    ),
    ("jamba", "think"): (
        f"<think>Hm</think>Look.\n<tool_calls>[{_ARRAY}]</tool_calls>",
        '<tool_calls>[\n {"name": "f", "arguments": {"city": "x"}}\n]</tool_calls> done',
        "<tool_calls>nothing</tool_calls> more",
        '<tool_calls>[{"name": "f", "arguments": {"a": "cut',
    ),
    ("nemotron_deci", "think"): (
        f"<think>Hm</think>Look.\n<TOOLCALL>[{_ARRAY}]</TOOLCALL>",
        '<TOOLCALL>[{"name": "f", "arguments": {"city": "x"}}]</TOOLCALL> done',
        "<TOOLCALL>nothing</TOOLCALL> more",
        '<TOOLCALL>[{"name": "f", "arguments": {"a": "cut',
    ),
    ("hunyuan_a13b", "hunyuan_a13b"): (
        '<think>\nHm 🤔\n</think>\n<answer>\nLook.\n</answer>\n<tool_calls>[{"name": "f", "arguments": {"city": "x"}}]'
        "</tool_calls>",
        '<think>Hm</think><answer>\n<tool_calls>[{"name": "g", "arguments": {}}]</tool_calls>\n</answer>',
        "<answer>It rains. Write <answer>x</answer> there.\n</answer>\n",
        "It rains </answer>",
        "<think>\nHm\n</think>\n<answer>cut",
    ),
    ("", "granite_thinking"): (
        "Here is my thought process: Hm 🤔\n\nHere is my response: It rains.",
        "Here's my thought process:\nHm\nHere's my response:\n\nIt rains.",
        "Here is my answer.",
        "Here is my thought process: cut",
    ),
}
"""Outputs by tool and reasoning parser: right ones, and slips that models make.

They call `get_weather(city: string, days: integer)`, `f(city: string)` and `g`. The tests cut and damage them in
every way.
"""

FRAGMENTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("deepseek_v32", "think"): (
        *DsmlParser.swallowed,
        '<｜DSML｜invoke name="f">',
        "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="city" string="true">',
        '<｜DSML｜parameter name="days" string="false">',
        "</｜DSML｜parameter>",
        '<｜DSML｜ invoke name="f">',
        "</｜DSML｜ invoke>",
        '<｜DSML｜ parameter name="city" string="true">',
        "</｜DSML｜ parameter>",
        "</｜DSML｜par",
        "<think>",
        "</think>",
    ),
    ("gemma4", "gemma4"): (
        "<|tool_call>call:f{",
        "<|tool_call>",
        "<tool_call|>",
        "city:",
        QUOTE,
        "'x'",
        '"k": "v\\',
        '<|"',
        "}",
        "[",
        "]",
        ",",
        "<|channel>thought\n",
        "<channel|>",
    ),
    ("kimi_k3", "kimi_k3"): (
        *KimiK3Parser.swallowed,
        *KimiK3Parser.dropped,
        '<|open|>call tool="f" index="1"<|sep|>',
        "<|close|>call<|sep|>",
        '<|open|>argument key="city" type="string"<|sep|>',
        '<|open|>argument key="days" type="integer"<|sep|>',
        "<|close|>argument<|sep|>",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        "<|close|>",
        "<|sep|>",
    ),
    ("minimax_m3", "minimax_m3"): (
        *MiniMaxM3Parser.swallowed,
        f'{NAMESPACE}<invoke name="f">',
        _M3_END,
        f"{NAMESPACE}<city>",
        f"{NAMESPACE}</city>",
        f"{NAMESPACE}<",
        "]<]mini",
        "<mm:think>",
        "</mm:think>",
    ),
    ("seed_oss", "seed_oss"): (
        "<seed:tool_call>",
        "</seed:tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=city>",
        "</parameter>",
        "<seed:think>",
        "</seed:think>",
        "</seed:",
    ),
    ("step3", "think"): (
        *Step3Parser.swallowed,
        '<steptml:invoke name="f">',
        "</steptml:invoke>",
        '<steptml:parameter name="city">',
        "</steptml:parameter>",
        "<｜tool_call_",
        "<think>",
        "</think>",
    ),
    ("hy_v3", "think"): (
        "<tool_calls>",
        "</tool_calls>",
        "<tool_call>f<tool_sep>",
        "</tool_call>",
        "<arg_key>city</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "</arg",
        "<think>",
        "</think>",
    ),
    ("cohere_command3", "cohere_command3"): (
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        '[{"tool_call_id": "0", "tool_name": "f", "parameters": {',
        '"a": 1',
        "}}]",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<|START_",
    ),
    ("phi4_mini_json", ""): ("functools[", "functools", *_ARRAY_FRAGMENTS),
    ("jamba", "think"): ("<tool_calls>", "</tool_calls>", "<tool_", "<think>", "</think>", *_ARRAY_FRAGMENTS),
    ("nemotron_deci", "think"): ("<TOOLCALL>", "</TOOLCALL>", "<TOOL", "<think>", "</think>", *_ARRAY_FRAGMENTS),
    ("hunyuan_a13b", "hunyuan_a13b"): (
        "<answer>",
        "</answer>",
        "\n",
        "<tool_calls>",
        "</tool_calls>",
        "<think>",
        "</think>",
        "</ans",
    ),
    ("", "granite_thinking"): (
        "Here is my thought process:",
        "Here's my response:",
        "Here is my response:",
        "Here is my ",
    ),
}
"""Pieces of the markup, of which the tests make nonsense."""

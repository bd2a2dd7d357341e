"""The snippets of make_snippets.py: a template, or (template, input)."""

TOOL = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather at a place <now> & \"later\"",
    "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "description": "Städte"},
        "unit": {"type": "string", "enum": ["C", "F"], "default": None},
        "days": {"type": "integer", "minimum": 1, "maximum": 18446744073709551615}},
        "required": ["city"]}, "items": "hidden by the method"}}

INPUT = {
    "messages": [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "Hi <b>there</b> & 'you'"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nÄhm 🦙", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 2}}}]},
        {"role": "tool", "content": "{\"t\": 7.50}", "tool_call_id": "c1"},
        {"role": "user", "content": [{"type": "text", "text": "part"}, {"type": "image"}]},
    ],
    "tools": [TOOL],
    "documents": None,
    "add_generation_prompt": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "n": 7, "neg": -3, "f": 2.5, "big": 1e20, "small": 1.5e-7, "zero": 0, "empty": "", "none": None,
    "text": "straße ΑΣ ÉTÉ ﬁx 🦙 end",
    "words": ["pear", "Apple", "fig", "apple", "Fig"],
    "nums": [3, 1, 2.5, 10, 1],
    "nested": {"a": {"b": [10, {"c": "deep"}]}, "keys": 1, "x y": 2},
    "rows": [{"k": "b", "v": 2}, {"k": "a", "v": 1}, {"k": "B"}],
}

CASES = [
    # Text and white space.
    "", "plain", "a\n", "a\n\n", "a\r\nb\rc", "{{ 'x' }}\n", "{{ 'x' }}\n\nb",
    "a\n  {% if true %}\n  b\n  {% endif %}\nc", "a\n  {%- if true -%}\n  b\n  {%- endif -%}\nc",
    "a\n  {%+ if true +%}\n  b\n  {%+ endif +%}\nc", "a  {% if true %} b {% endif %}  c",
    "  {% if true %}x{% endif %}", "\t{% set a = 1 %}\n\t{{ a }}\n\t{# c #}\n.", "{# c #}\nx", "{#- c -#}\n x", "a {#- c #} b",
    "a\n   {{ 'x' }}\n  b", "a\n   {{- 'x' -}}\n  b", "{{- 'x' +}}" , "a {{+ 1 }}", "{% raw %}{{ x }}{% y %}{% endraw %}z",
    "a\n  {% raw %}\n  {{ x }}\n  {% endraw %}\nb", "a {%- raw -%}  {{ x }}  {%- endraw -%} b", "{% raw -%} a {#x#} {%- endraw %}",
    "a\u00a0\u2003{%- if true %}b{% endif -%}\u3000c", "{% if true %}\n\n\nx\n\n{% endif %}\n\ny", "}} %} #}", "{ {", "{{ '}}' }}",
    "{{ '%}' }}{% set a = '%}' %}{{ a }}", "{{ {'a': {'b': 1}}['a']['b'] }}", "{{ {'a': {'b': 1}} }}", "{{\n1\n+\n2\n}}",
    "{% if true %}\n    {% for x in [1,2] %}\n        {{ x }}\n    {% endfor %}\n{% endif %}\nend",
    # Literals and escapes.
    r"{{ 'a\nb\tc\\d\'e\"f' }}", r'{{ "a\"b\'c" }}', r"{{ '\x41\u00e9\U0001F999\101\q' }}", "{{ 'multi\nline' }}", r"{{ 'é\é' }}",
    r"{{ 'a\
b' }}", "{{ 'a' 'b' \"c\" }}", "{{ 1_000 }} {{ 0x1F }} {{ 0b101 }} {{ 0o17 }}", "{{ 1.5 }} {{ 1e3 }} {{ 2.50 }} {{ 1e-7 }} {{ 1e16 }} {{ 123456789012345.0 }}",
    "{{ true }} {{ True }} {{ false }} {{ none }} {{ None }}", "{{ [1, 'a', none, true, 2.0, [], {}, ()] }}", "{{ (1,) }} {{ (1, 2) }} {{ () }}",
    "{{ {'a': 1, \"b'\": [2], 3: 'c'} }}", "{{ 1, 2 }}", "{{ [1, 2,] }}", "{{ {'a': 1,} }}", "{{ {'a': 1, 'a': 2} }}", "{{ {1: 'a', true: 'b'} }}",
    r"""{{ ["it's", 'say "x"', 'both \' and "', '\n\t\\', 'é🦙\u200b\x07'] }}""", "{{ big }} {{ small }} {{ f }} {{ neg }}",
    "{{ 1.0 }} {{ 100.0 }} {{ 1e15 }} {{ 1e17 }} {{ 0.0001 }} {{ 0.00001 }} {{ 1/3 }} {{ -0.0 }}",
    # Arithmetic.
    "{{ 7 + 3 }} {{ 7 - 3 }} {{ 7 * 3 }} {{ 7 / 2 }} {{ 7 // 2 }} {{ 7 % 3 }} {{ 2 ** 10 }}",
    "{{ -7 // 2 }} {{ -7 % 3 }} {{ 7 // -2 }} {{ 7 % -3 }} {{ 7.5 // 2 }} {{ -7.5 % 2 }} {{ 2 ** -1 }} {{ 2 ** 0.5 }}",
    "{{ 6 / 2 }} {{ 1 + 2 * 3 }} {{ (1 + 2) * 3 }} {{ -2 ** 2 }} {{ 2 ** 3 ** 2 }} {{ 10 - 2 - 3 }} {{ -n }} {{ +n }} {{ - -n }}",
    "{{ 'a' + 'b' }} {{ 'ab' * 3 }} {{ 2 * 'x' }} {{ [1] + [2] }} {{ [0] * 3 }} {{ (1,) + (2,) }} {{ 'a' * -1 }}",
    "{{ 1 ~ 'a' ~ none ~ true ~ 2.0 ~ [1] }}", "{{ 'a' ~ 1 + 2 }}", "{{ true + 1 }}", "{{ 18446744073709551615 }}" , "{{ 9007199254740993 * 3 }}",
    "{{ 1 + 'a' }}", "{{ 'a' + 1 }}", "{{ 'a' + none }}", "{{ none + 1 }}", "{{ 1 / 0 }}", "{{ 1 // 0 }}", "{{ 1 % 0 }}", "{{ 1.5 / 0 }}", "{{ [1] + (2,) }}",
    "{{ '%s is %d, %5.2f|%-5s|%05d|%x|%%' % ('a', 3, 2.345, 'l', 42, 255) }}", "{{ '%s' % 'x' }}", "{{ '%s' % [1, 'a'] }}", "{{ '%(a)s-%(b)r' % {'a': 1, 'b': 'x'} }}",
    "{{ '%s %s' % ('a',) }}", "{{ 'x' % 1 }}", "{{ '%d' % 'a' }}", "{{ '%s' % none }}", "{{ '%e %g %G' % (12345.678, 0.00001234, 1e20) }}", "{{ '%+d % d' % (3, 4) }}",
    # Comparisons and logic.
    "{{ 1 == 1.0 }} {{ 1 == true }} {{ 'a' == 'a' }} {{ [1, 2] == [1, 2.0] }} {{ {'a': 1, 'b': 2} == {'b': 2, 'a': 1} }} {{ (1,) == [1] }} {{ none == false }}",
    "{{ 1 < 2 < 3 }} {{ 3 > 2 > 2 }} {{ 1 != 2 }} {{ 2 >= 2 <= 3 }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ 'Z' < 'a' }} {{ 'é' > 'z' }}",
    "{{ 1 in [1, 2] }} {{ 'a' in 'cat' }} {{ 'k' in {'k': 1} }} {{ 3 not in [1] }} {{ '' in 'a' }} {{ 2 in (1, 2) }} {{ not 1 in [1] }}",
    "{{ 'b' in nested.a }} {{ 'x y' in nested }} {{ 1 in undefined_thing }}", "{{ 1 in 'abc' }}", "{{ 1 in none }}", "{{ 'a' < 1 }}", "{{ none < 1 }}", "{{ [] in {} }}",
    "{{ 1 and 2 }} {{ 0 and 2 }} {{ 0 or 'x' }} {{ '' or none }} {{ not '' }} {{ not not 1 }} {{ 1 and 0 or 3 }} {{ none or false or [] }}",
    "{{ 'a' if true else 'b' }} {{ 'a' if false else 'b' }} [{{ 'a' if false }}] {{ 1 if 0 else 2 if 0 else 3 }}", "{{ ('a' if false) is defined }}",
    "{{ 'yes' if n > 5 and n < 10 else 'no' }}", "{{ (1 if true else 2) + 3 }}", "{{ 'x' if messages and messages[0].role == 'system' else 'y' }}",
    # Undefined.
    "[{{ nothing }}]", "[{{ nothing ~ 'a' }}]", "{{ nothing.x }}", "{{ nothing['x'] }}", "{{ nothing + 1 }}", "{{ nothing() }}", "{{ nothing is defined }} {{ nothing is undefined }}",
    "{{ nothing | default('d') }} {{ none | default('d') }} {{ '' | default('d', true) }} {{ 0 | d('z', boolean=true) }} {{ n | d(1) }}",
    "{% if nothing %}a{% else %}b{% endif %}", "{% for x in nothing %}a{% else %}empty{% endfor %}", "{{ nothing | length }} {{ nothing | list }} {{ nothing | upper }} {{ nothing | join(',') }}",
    "{{ messages[0].nope is defined }} {{ messages[0]['nope'] is undefined }} [{{ messages[0].nope }}]", "{{ messages[9] }}", "{{ messages[9].role }}", "{{ messages[0].nope.deep }}", "{{ none.x }}[{{ none.x is defined }}]",
    "{{ none.x.y }}", "{{ nothing == nothing2 }} {{ nothing == none }} {{ nothing != 1 }}", "{{ [nothing] }}", "{{ nothing < 1 }}", "{{ -nothing }}", "{{ nothing | int }}", "{{ n.foo }}|{{ n[0] }}|{{ 'abc'[10] }}", "{{ nothing is none }} {{ nothing is string }} {{ nothing is iterable }} {{ nothing is sequence }} {{ nothing is mapping }}",
    "{{ nothing[1:] }}", "{{ nothing | tojson }}", "{{ none[0] }}|", "{{ documents[1:] }}", "{{ nothing | trim }}|{{ none | trim }}|{{ 5 | trim }}",
    # Access.
    "{{ nested.a.b[1].c }} {{ nested['a']['b'][0] }} {{ nested.a.b[-1]['c'] }} {{ nested['x y'] }}", "{{ nested.keys() | list }} {{ nested['keys'] }}", "{{ tools[0].function.items() | length }}",
    "{{ tools[0].function['items'] }}", "{{ words[0] }} {{ words[-1] }} {{ words.0 }} {{ words[1:3] }} {{ words[::-1] }} {{ words[-2:] }} {{ words[:-3] }} {{ words[::2] }} {{ words[3:0:-1] }} {{ words[10:] }} {{ words[-100:2] }}",
    "{{ text[0] }} {{ text[4] }} {{ text[-5] }} {{ text[4:8] }} {{ text[::-1] }} {{ text[-5:] }} {{ text[:3] }} {{ text | length }}", "{{ 'abc'[1:2] }} {{ 'abc'[::-2] }} {{ (1, 2, 3)[1:] }}", "{{ words[none:2] }}", "{{ words['a'] }}|{{ words[1.0] }}|{{ words[true] }}",
    "{{ words[::0] }}", "{{ words['a':] }}", "{{ nested[1:] }}", "{{ nested[[1]] }}|", "{{ n[1:] }}", "{{ range(10)[2:5] }} {{ range(5)[-1] }} {{ range(0, 10, 3)[::-1] | list }}", "{{ messages[-1].content[0].text }}", "{{ messages[messages | length - 2].role }}",
    "{{ messages | map(attribute='role') | join(',') }} {{ messages[1:][0]['role'] }} {{ (messages | first).role }} {{ (messages | last)['role'] }}",
    # Sandbox.
    "{{ words.append('x') }}", "[{{ words.append }}]", "{{ nested.pop('a') }}", "{{ nested.update({'b': 1}) }}", "{{ words.__class__ }}|", "{{ ''.__class__ }}|", "{{ words.sort() }}", "{{ nested.clear() }}", "{{ n.__add__ }}|", "{{ words.append is defined }}",
    # If, for.
    "{% if n == 1 %}a{% elif n == 7 %}b{% elif true %}c{% else %}d{% endif %}", "{% if n == 1 %}a{% elif n == 2 %}b{% else %}d{% endif %}", "{% if n %}{% if zero %}x{% else %}y{% endif %}{% endif %}", "{% if not n %}a{% endif %}|",
    "{% for w in words %}{{ loop.index }}/{{ loop.index0 }}/{{ loop.revindex }}/{{ loop.revindex0 }}/{{ loop.first }}/{{ loop.last }}/{{ loop.length }} {% endfor %}",
    "{% for w in words %}{{ loop.previtem }}<{{ w }}>{{ loop.nextitem }} {% endfor %}", "{% for w in words %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }}{% endfor %}", "{% for w in words %}{{ loop.cycle('a', 'b') }}{% endfor %}", "{% for x in [1,1,2,2,1] %}{{ loop.changed(x) }} {% endfor %}",
    "{% for w in words if w|length > 3 %}{{ loop.index }}{{ w }}{{ loop.last }} {% else %}none{% endfor %}", "{% for w in words if w == 'zzz' %}{{ w }}{% else %}none{% endfor %}", "{% for k, v in nested.items() %}{{ k }}={{ v }};{% endfor %}", "{% for k in nested %}{{ k }};{% endfor %}", "{% for k, v in nested | items %}{{ k }};{% endfor %}",
    "{% for a, (b, c) in [(1, (2, 3)), (4, [5, 6])] %}{{ a }}{{ b }}{{ c }} {% endfor %}", "{% for a, b in [(1, 2, 3)] %}{% endfor %}", "{% for a, b in [(1,)] %}{% endfor %}", "{% for c in 'aé🦙' %}{{ c }}-{% endfor %}", "{% for x in 5 %}{% endfor %}", "{% for x in none %}{% endfor %}", "{% for x in range(3) %}{{ x }}{% endfor %}|{{ range(2, 8, 3) | list }}|{{ range(3, 0, -1) | list }}|{{ range(3) }}|{{ range(1, 9, 2) }}|{{ range(0) | list }}",
    "{% for x in [1,2,3,4,5] %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %}", "{% for x in [1,2] %}{% for y in [1,2] %}{% if y == 2 %}{% break %}{% endif %}{{ x }}{{ y }} {% endfor %}{% endfor %}", "{% for x in [1] %}{% break %}{% else %}e{% endfor %}|", "{% for x in [1] %}{% continue %}{% else %}e{% endfor %}|",
    "{% for x in [1,2] %}{% for y in [3,4] %}{{ loop.index }}{% endfor %}{{ loop.index }} {% endfor %}", "{% for x in [1,2] %}{% set outer = loop %}{% for y in [3,4] %}{{ outer.index }}{{ loop.index }} {% endfor %}{% endfor %}", "{% for x in words | sort %}{{ x }} {% endfor %}", "{% for x in words | reverse %}{{ x }} {% endfor %}", "{% for x in (words | map('upper')) %}{{ loop.length }}{{ x }}{{ loop.last }} {% endfor %}",
    "{% for x in [] %}x{% else %}{{ n }}{% endfor %}", "{% for i in range(3) %}{% if loop.last %}{{ i }}{% endif %}{% endfor %}", "{% set ns = namespace(flag=false) %}{% for x in [1,2,3] if not ns.flag %}{{ x }}{% set ns.flag = x == 2 %}{% endfor %}", "{% for m in messages %}{{ loop.index0 % 2 == 0 }}{{ m['role'] }} {% endfor %}",
    "{% for x in 1, 2, 3 %}{{ x }}{% endfor %}", "{% for x in [3] %}{{ loop }}{% endfor %}", "{% for x in [1, 2] %}{{ x }}{{ ',' if not loop.last }}{% endfor %}",
    # Scopes and set.
    "{% set x = 1 %}{% for i in [1,2] %}{% set x = i + 10 %}{{ x }} {% endfor %}{{ x }}", "{% set x = 1 %}{% for i in [1,2] %}{{ x }}{% set x = 5 %}{{ x }} {% endfor %}", "{% if true %}{% set x = 3 %}{% endif %}{{ x }}", "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set a, b = 'xy' %}{{ a }}{{ b }}", "{% set x = 1, 2 %}{{ x }}", "{% set ns = namespace(a=1, b='x') %}{% for i in [1,2,3] %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}{{ ns.b }}[{{ ns.c }}]",
    "{% set ns = namespace() %}{% set ns.x = [1] %}{{ ns.x }}{{ ns['x'] }}{{ ns.y is defined }}", "{% set ns = namespace({'a': 5}) %}{{ ns.a }}", "{% set x = {} %}{% set x.a = 1 %}", "{% set x %}a{{ n }}b{% endset %}{{ x }}{{ x | length }}", "{% set x | upper | trim %} a{{ n }}b {% endset %}[{{ x }}]", "{% set ns = namespace(t='') %}{% set ns.t %}q{% endset %}{{ ns.t }}", "{% set x %}{% set y = 1 %}{% endset %}[{{ y }}]",
    "{% set loop_messages = messages[1:] %}{{ loop_messages | length }}", "{% set a = b = 1 %}", "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}[{{ a }}]", "{% set a = 5 %}{% with a = 1, b = a %}{{ a }}{{ b }}{% endwith %}{{ a }}", "{% with %}{% set z = 1 %}{{ z }}{% endwith %}[{{ z }}]", "{% set n = n + 1 %}{{ n }}", "{% set messages = messages[:1] %}{{ messages | length }}", "{% set true = 1 %}", "{% set x = 'a' if false %}[{{ x }}]{{ x is defined }}", "{% for i in [1] %}{% set q = 1 %}{% endfor %}{{ q is defined }}",
    # Macros, call, filter blocks, generation.
    "{% macro m(a, b='d') %}{{ a }}-{{ b }};{% endmacro %}{{ m(1) }}{{ m(1, 2) }}{{ m(b=3, a=4) }}{{ m() }}", "{% macro m(a, b=a ~ '!') %}{{ b }}{% endmacro %}{{ m('x') }}", "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}", "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(c=2) }}", "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, x=3) }}", "{% macro m(x) %}{% if x > 0 %}{{ x }}{{ m(x - 1) }}{% endif %}{% endmacro %}{{ m(3) }}",
    "{% set g = 1 %}{% macro m() %}{{ g }}{% endmacro %}{% set g = 2 %}{{ m() }}", "{% macro m() %}{% set inner = 1 %}{% endmacro %}{{ m() }}[{{ inner }}]", "{% macro m() %} x {% endmacro %}[{{ m() | trim }}]{{ m() is string }}", "{% macro m(a) %}{{ caller() }}{{ a }}{% endmacro %}{% call m(1) %}body{% endcall %}", "{% macro m() %}{{ caller(1, 2) }}{% endmacro %}{% call(x, y=5) m() %}{{ x }}+{{ y }}{% endcall %}", "{% macro m() %}[{{ caller is defined }}]{% endmacro %}{{ m() }}", "{% for i in [1,2] %}{% macro m() %}{{ i }}{% endmacro %}{{ m() }}{% endfor %}", "{% macro a() %}A{{ b() }}{% endmacro %}{% macro b() %}B{% endmacro %}{{ a() }}", "{{ m }}{% macro m() %}{% endmacro %}[{{ m }}]",
    "{% macro m(x, y) %}[{{ x }},{{ y }}]{% endmacro %}{{ m(*[1, 2]) }}{{ m(**{'x': 3, 'y': 4}) }}{{ m(5, *[6]) }}", "{% macro m(x) %}{{ x.y }}{% endmacro %}{{ m() }}", "{% filter upper %}a{{ n }}b{% endfilter %}", "{% filter trim | upper | replace('A', 'x') %}  abc {% endfilter %}|", "{% filter indent(2) %}a\nb{% endfilter %}", "{% generation %}{{ n }}{% endgeneration %}|", "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %},{% endfor %}", "{% generation %}{% set x = 1 %}{% endgeneration %}[{{ x }}]",
    "{% macro render_type(p) -%}\n  {%- if p.type == 'string' %}{{- 'str' -}}{%- elif p.type == 'array' %}{{- 'list[' + render_type(p['items']) + ']' -}}{%- else %}any{% endif %}\n{%- endmacro %}{{ render_type({'type': 'array', 'items': {'type': 'string'}}) }}",
    # Tests.
    "{{ n is number }} {{ f is number }} {{ true is number }} {{ 'a' is number }} {{ n is integer }} {{ true is integer }} {{ f is float }} {{ n is float }} {{ true is boolean }} {{ 1 is boolean }} {{ true is true }} {{ 1 is true }} {{ false is false }} {{ 0 is false }}",
    "{{ 'a' is string }} {{ 1 is string }} {{ {} is mapping }} {{ [] is mapping }} {{ [] is sequence }} {{ 'a' is sequence }} {{ {} is sequence }} {{ 1 is sequence }} {{ [] is iterable }} {{ 'a' is iterable }} {{ 1 is iterable }} {{ none is none }} {{ 0 is none }} {{ (1,) is sequence }} {{ none is sequence }}",
    "{{ 3 is odd }} {{ 3 is even }} {{ 9 is divisibleby 3 }} {{ 9 is divisibleby(2) }} {{ 'abc' is lower }} {{ 'ABC' is upper }} {{ 'aB' is lower }} {{ '1' is upper }}", "{{ 1 is eq 1 }} {{ 1 is equalto 2 }} {{ 1 is ne 2 }} {{ 1 is lt 2 }} {{ 1 is gt 2 }} {{ 1 is ge 1 }} {{ 1 is le 0 }} {{ 1 is in [1] }} {{ 'a' is in 'b' }} {{ 1 is not in [2] }} {{ none is sameas none }}",
    "{{ x is not defined }} {{ n is not none and n is defined }} {{ not n is none }} {{ n is defined or x }}", "{{ range is callable }} {{ n is callable }} {{ words.index is callable }} {{ namespace is defined }} {{ raise_exception is defined }} {{ 'upper' is filter }} {{ 'nope' is filter }} {{ 'odd' is test }}", "{{ messages[0].content is string }} {{ messages[4].content is not string }} {{ messages[4].content is iterable and messages[4].content is not mapping }}", "{{ 'abc' is odd }}", "{{ 2.0 is even }} {{ 1.5 is odd }}", "{{ n is divisibleby 7 and true }}", "{{ n + 1 is odd }}",
    # String methods.
    "{{ '  a b '.strip() }}|{{ '  a'.lstrip() }}|{{ 'a  '.rstrip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'abcba'.strip('ab') }}|{{ '\n\na'.lstrip('\n') }}|{{ 'é🦙é'.strip('é') }}|{{ '\u2003a\u00a0'.strip() }}|{{ ' a '.strip(none) }}|",
    "{{ 'a,b,c'.split(',') }} {{ 'a,b,c'.split(',', 1) }} {{ 'a,b,c'.rsplit(',', 1) }} {{ ' a  b '.split() }} {{ 'a b c'.split(maxsplit=1) }} {{ 'a  b c '.split(none, 1) }} {{ ' a b  c '.rsplit(none, 1) }} {{ ''.split() }} {{ ''.split(',') }} {{ 'a::b'.split('::')[-1] }} {{ 'abc'.split('x') }} {{ 'a b c'.split(sep=' ') }} {{ ' a b c d '.rsplit() }}",
    "{{ 'a'.split('') }}", "{{ 'a\nb\r\nc\x0bd\u2028e\n'.splitlines() }} {{ 'a\nb\n'.splitlines(true) }} {{ ''.splitlines() }} {{ '\n'.splitlines() }}", "{{ 'hello'.startswith('he') }} {{ 'hello'.startswith(('x', 'h')) }} {{ 'hello'.endswith('lo') }} {{ 'hello'.endswith(('x', 'y')) }} {{ 'hello'.startswith('l', 2) }} {{ 'hello'.startswith('') }} {{ 'abc'.endswith('b', 0, 2) }}", "{{ 'a'.startswith(1) }}", "{{ 'a'.startswith(['a']) }}",
    "{{ text.upper() }}|{{ text.lower() }}|{{ text.title() }}|{{ text.capitalize() }}|{{ text.swapcase() }}", "{{ 'they\\'re bill\\'s'.title() }} {{ \"they're bill's-x (a)\" | title }} {{ 'ΑΣ ΣΑΣ Σ'.lower() }} {{ 'İ'.lower() | length }} {{ 'ŉ'.upper() }} {{ 'ǆ'.title() }} {{ 'ﬀ'.title() }}", "{{ 'aaa'.replace('a', 'b') }} {{ 'aaa'.replace('a', 'b', 2) }} {{ 'abc'.replace('', '-') }} {{ 'abc'.replace('', '-', 2) }} {{ 'abc'.replace('b', '') }} {{ 'é'.replace('', '.') }}", "{{ 'a'.replace('a') }}", "{{ 'a'.replace(1, 2) }}",
    "{{ 'héllo'.find('l') }} {{ 'hello'.find('z') }} {{ 'héllo'.rfind('l') }} {{ 'hello'.find('l', 3) }} {{ 'hello'.find('l', -2) }} {{ 'hello'.index('e') }} {{ 'hello'.count('l') }} {{ 'aaa'.count('aa') }} {{ 'abc'.count('') }} {{ 'hello'.find('', 9) }} {{ 'hello'.find('', 5) }} {{ 'hello'.rfind('l', 0, 3) }}", "{{ 'hello'.index('z') }}", "{{ ', '.join(['a', 'b']) }} {{ ''.join('abc') }} {{ '-'.join(nested) }}", "{{ ','.join([1]) }}", "{{ '123'.isdigit() }} {{ '²'.isdigit() }} {{ '१'.isdigit() }} {{ '1a'.isdigit() }} {{ ''.isdigit() }} {{ 'aé'.isalpha() }} {{ 'a1'.isalnum() }} {{ ' \t'.isspace() }} {{ 'ab'.islower() }} {{ 'AB1'.isupper() }} {{ 'é'.isascii() }} {{ '½'.isalnum() }}",
    "{{ 'prefix-x'.removeprefix('prefix-') }} {{ 'x.jinja'.removesuffix('.jinja') }} {{ 'a'.removesuffix('') }} {{ 'abc'.partition('b') }} {{ 'abcb'.rpartition('b') }} {{ 'abc'.partition('z') }} {{ 'abc'.rpartition('z') }}", "{{ 'a'.center(4) }}|{{ 'ab'.center(5, '*') }}|{{ 'a'.ljust(3) }}|{{ 'a'.rjust(3, '-') }}|{{ '-5'.zfill(4) }}|{{ '7'.zfill(3) }}", "{{ '{} {}'.format('a', 1) }} {{ '{1}{0}'.format('a', 'b') }} {{ '{x}={y!r}'.format(x=1, y='q') }} {{ '{{}}'.format() }} {{ '{:>5}|{:<5}|{:^5}|{:.2f}|{:05d}|{:x}'.format('a', 'b', 'c', 3.14159, 42, 255) }} {{ '{}'.format(none) }} {{ '{:*^7}'.format('ab') }} {{ '{:.3}'.format('abcdef') }} {{ '{:d}'.format(5) }} {{ '{:.1%}'.format(0.256) }} {{ '{:+}'.format(5) }}", "{{ '{} {}'.format('a') }}", "{{ '{'.format() }}", "{{ '{x}'.format() }}", "{{ 'a'.nope() }}", "{{ 'abc'.nope }}|", "{{ 'a'.upper(1) }}", "{{ n.upper() }}",
    # Dict and list methods.
    "{{ nested.get('a') }} {{ nested.get('zz') }} {{ nested.get('zz', 5) }} {{ nested.keys() }} {{ {'a': 1}.values() }} {{ {'a': 1}.items() }} {{ {'a': 1}.items() | list }} {{ {'a': 1}.keys() | length }} {{ 'a' in {'a': 1}.keys() }} {{ 1 in {'a': 1}.values() }} {{ {'a': 1}.copy() }}", "{{ {'a': 1}.keys()[0] }}|", "{{ words.index('fig') }} {{ words.count('fig') }} {{ (1, 2, 1).count(1) }} {{ [1].copy() }}", "{{ words.index('zz') }}", "{{ {}.keys() and 1 }}|{{ {'a': 1}.items() and 1 }}", "{{ nested.nope() }}", "{{ dict(a=1, b=2) }} {{ dict([('x', 1)]) }} {{ dict({'a': 1}, b=2) }} {{ dict() }}", "{{ {'a': 1} | length }} {{ {'b': 1, 'a': 2} | list }} {{ {'b': 1} | first }}",
    # Filters.
    "{{ tools | tojson }}", "{{ tools | tojson(indent=2) }}", "{{ tools[0] | tojson(indent=4) }}", "{{ messages | tojson }}", "{{ [1, 2.0, 1e20, 1e-7, none, true, 'é\"\\\\\\n\\t\\x01\\x7f\\u2028🦙', {}, [], ()] | tojson }}", "{{ {'b': 1, 'a': {'c': []}} | tojson(indent=2) }} {{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }} {{ 'é🦙' | tojson(ensure_ascii=true) }} {{ {'a': [1, 2]} | tojson(separators=(',', ':')) }} {{ [1, {'a': 2}] | tojson(indent=0) }} {{ [1] | tojson(indent='\t') }}", "{{ {1: 'a', none: 'b', true: 'c', 1.5: 'd'} | tojson }}", "{{ {(1, 2): 3} | tojson }}", "{{ words | map('upper') | tojson }}", "{{ range(3) | tojson }}", "{{ range(3) | list | tojson }}", "{{ 'a\x7fb' | tojson }} {{ '<a href=\"x\">&\\'</a>' | tojson }}", "{{ [] | tojson(indent=2) }}{{ {} | tojson(indent=2) }}{{ [[], {}] | tojson(indent=1) }}",
    "{{ '  a ' | trim }}|{{ 'xax' | trim('x') }}|{{ words | length }} {{ words | count }} {{ 'é' | length }} {{ nested | length }}", "{{ n | length }}", "{{ none | length }}", "{{ 'aB' | upper }} {{ 'aB' | lower }} {{ 'aB cD' | title }} {{ 'aB' | capitalize }} {{ 5 | upper }} {{ none | lower }}", "{{ words | join(', ') }} {{ [1, none, 'a'] | join }} {{ rows | join('|', attribute='k') }} {{ 'abc' | join('-') }} {{ {'a': 1, 'b': 2} | join(',') }}", "{{ words | first }} {{ words | last }} {{ [] | first }}|{{ [] | last }}|{{ 'abc' | first }}{{ 'abc' | last }}", "{{ words | list }} {{ 'aé' | list }} {{ (1, 2) | list }} {{ nested | list }}", "{{ nested | dictsort | map('first') | join(',') }} {{ {'b': 1, 'A': 2, 'c': 0} | dictsort }} {{ {'b': 1, 'A': 2} | dictsort(true) }} {{ {'b': 1, 'A': 2} | dictsort(false, 'value') }} {{ {'b': 1, 'A': 2} | dictsort(reverse=true) }}",
    "{{ rows | map(attribute='k') | list }} {{ rows | map(attribute='v', default=0) | list }} {{ rows | map(attribute='v') | list }} {{ words | map('upper') | list }} {{ words | map('replace', 'p', 'q') | list }} {{ words | map('length') | sum }} {{ [[1, 2], [3]] | map('first') | list }} {{ [{'a': {'b': 1}}] | map(attribute='a.b') | list }} {{ [[1, 2]] | map(attribute=1) | list }} {{ [[1, 2]] | map(attribute='0') | list }}", "{{ words | map() | list }}", "{{ [] | map() | list }}", "{{ words | select('equalto', 'fig') | list }} {{ nums | select('odd') | list }} {{ nums | reject('gt', 2) | list }} {{ [0, 1, '', 'a', none] | select | list }} {{ [0, 1] | reject | list }} {{ rows | selectattr('k', 'equalto', 'a') | list }} {{ rows | selectattr('v') | list }} {{ rows | rejectattr('v') | list }} {{ rows | selectattr('v', 'defined') | map(attribute='v') | list }} {{ rows | selectattr('v', 'undefined') | list }} {{ messages | selectattr('role', 'in', ['user', 'tool']) | list | length }} {{ messages | rejectattr('role', '==', 'user') | map(attribute='role') | join(' ') }}",
    "{% set g = messages | selectattr('role', 'equalto', 'nobody') %}{% if g %}truthy{% endif %}{{ g | list | length }}{{ g | list | length }}", "{% set g = messages | selectattr('role', 'equalto', 'user') %}{{ g | list | length }}{{ g | list | length }}", "{{ (messages | selectattr('role', 'equalto', 'user')) | length }}", "{{ (words | map('upper'))[0] }}|", "{{ words | map('upper') | first }} {{ words | map('upper') | last }}", "{{ words | map('upper') is iterable }} {{ words | map('upper') is sequence }} {{ words | map('upper') is string }}", "{{ 'FIG' in words | map('upper') }}",
    "{{ 'aXa' | replace('X', 'y') }} {{ 'aaa' | replace('a', 'b', 2) }} {{ 121 | replace(1, 3) }} {{ 'ab' | replace('b', none) }}", "{{ 5 | string ~ 'a' }} {{ (5 | string) + 'a' }} {{ [1] | string }} {{ none | string }}", "{{ '42' | int }} {{ ' 42 ' | int }} {{ '42.9' | int }} {{ 'x' | int }} {{ 'x' | int(7) }} {{ 3.9 | int }} {{ -3.9 | int }} {{ 'ff' | int(0, 16) }} {{ '0x1f' | int(base=16) }} {{ none | int }} {{ [] | int(3) }} {{ true | int }} {{ '1_000' | int }} {{ '1e3' | int }}", "{{ '2.5' | float }} {{ 'x' | float }} {{ 'x' | float(1.5) }} {{ 3 | float }} {{ ' 1e3 ' | float }} {{ 'nan' | float }} {{ '-inf' | float }} {{ none | float }}", "{{ -3 | abs }} {{ 3.5 | abs }} {{ neg | abs }} {{ 'a' | abs }}", "{{ 2.5 | round }} {{ 3.5 | round }} {{ 2.675 | round(2) }} {{ 42.55 | round(1, 'floor') }} {{ 42.51 | round(1, 'ceil') }} {{ 5 | round }} {{ 1234 | round(-2) }} {{ 1.0 | round | int }} {{ 0.15 | round(1) }} {{ -0.4 | round }}",
    "{{ words | reverse | list }} {{ 'abé' | reverse }} {{ (1, 2) | reverse | list }}", "{{ words | sort }} {{ words | sort(reverse=true) }} {{ words | sort(case_sensitive=true) }} {{ nums | sort }} {{ rows | sort(attribute='k') | map(attribute='k') | list }} {{ 'bca' | sort }} {{ [[2, 'a'], [1, 'b']] | sort }} {{ rows[:2] | sort(attribute='v,k') }}", "{{ [1, 'a'] | sort }}", "{{ words | unique | list }} {{ words | unique(true) | list }} {{ nums | unique | list }} {{ rows | unique(attribute='k') | list }}", "{{ nums | min }} {{ nums | max }} {{ words | min }} {{ words | max }} {{ [] | min }}| {{ rows[:2] | max(attribute='v') }} {{ [1, 2.0, 2] | max }}", "{{ nums | sum }} {{ rows[:2] | sum(attribute='v') }} {{ [] | sum }} {{ [1] | sum(start=5) }} {{ [[1], [2]] | sum(start=[]) }}", "{{ 'a\nb\n\nc' | indent }}|{{ 'a\nb' | indent(2, true) }}|{{ 'a\n\nb' | indent(width=1, blank=true) }}|{{ 'a\nb' | indent('>> ') }}|{{ '' | indent }}|{{ 'a\n' | indent }}|", "{{ none | indent }}",
    "{{ '<a>&\"\\'' | e }} {{ '<' | escape | escape }} {{ '<b>' | safe }} {{ ('<b>' | safe) + '<i>' }} {{ '<' + ('<' | safe) }} {{ ('<' | e) ~ '<' }} {{ ['<' | safe] }} {{ ('<p>' | safe).upper() }} {{ ('x' | safe).replace('x', '<') }} {{ ('a,<' | safe).split(',')[1] + '<' }} {{ 5 | e }} {{ ('<' | safe) is string }} {{ ('<' | safe) == '<' }} {{ ('<' | safe) * 2 + '>' }} {{ ('<' | safe)[0] + '<' }} {{ ('<' | safe) is escaped }}", "{{ [1,2,3,4,5] | batch(2) | list }} {{ [1,2,3] | batch(2, 'x') | list }} {{ [1,2,3,4,5] | slice(2) | list }} {{ [1,2,3] | slice(2, 'x') | list }}", "{{ 'foo bar baz qux' | truncate(9) }} {{ 'foo bar baz qux' | truncate(9, true) }} {{ 'foo bar baz qux' | truncate(11, false, '...', 0) }} {{ 'short' | truncate(10) }} {{ 'foobarbazqux' | truncate(6, false, '~', 0) }}", "{{ '%s-%s' | format('a', 1) }} {{ '%(x)s' | format(x=2) }}", "{{ 'ab' | center(6) }}|", "{{ 'a b' | title | upper | lower | replace('a', 'c') }}", "{{ -1 | abs + 2 }} {{ 'a' ~ 'b' | upper }} {{ ('a' ~ 'b') | upper }} {{ not 'a' | length == 0 }} {{ n | string | length + 1 }}", "{{ words | sort | first | upper }}", "{{ words|join(' ')|upper }} {{ words | length > 3 }}", "{{ 'x' | default('y') | upper }}", "{{ messages | length // 2 }}", "{{ {'a': 1} | items | list }} {{ 5 | items | list }}",
    # Exceptions and functions.
    "{{ raise_exception('boom: ' ~ n) }}", "a{% if n == 7 %}{{ raise_exception('turns must alternate: user first') }}{% endif %}", "{% if false %}{{ raise_exception('no') }}{% endif %}ok", "{{ raise_exception(none) }}", "{{ raise_exception() }}", "{% set x = raise_exception('in set') %}", "{{ 'a'() }}", "{{ n() }}", "{{ messages[0].content() }}", "{{ range(1000000) | list | length }}", "{{ range('a') }}", "{{ range(1, 5, 0) }}", "{{ namespace(a=1).a }}", "{{ dict(a=1).a }}",
    # Syntax errors.
    "{{ }}", "{{ 1 + }}", "{% if %}{% endif %}", "{% if true %}", "{% endif %}", "{% for x in %}{% endfor %}", "{% nope %}", "{{ a b }}", "{{ (1 }}", "{{ 'a }}", "{{ [1 }}", "{# open", "{% raw %} open", "{% if true %}{% endfor %}", "{{ 1 | nope }}", "{{ 1 is nope }}", "{% set 1 = 2 %}", "{% macro %}{% endmacro %}", "{{ x y z }}", "{{ a. }}", "{% else %}", "{% for x in [1] %}{% elif %}{% endfor %}", "{{ {1 2} }}", "{% break %}", "{{ $ }}", "{% if a = 1 %}{% endif %}", "{{ a[ }}", "{% set %}", "{{ 1 }", "{{ '\\x4' }}", "{{ f(a=1, 2) }}", "{% macro m(a=1, b) %}{% endmacro %}", "{% call n %}{% endcall %}", "{{ x if }}", "{{ x is }}", "{{ n is string is string }}", "{% for a.b in [1] %}{% endfor %}", "{{ not }}", "{{ 1 }}}", "{% if true %}a{% else %}b{% else %}c{% endif %}",
]

# Conversations: templates of our own through the constructs that published ones are built from.

# Date with a default, tools in the system or the first user turn, one call a turn, results as JSON (as Llama 3.x does it).
DATED = """{%- if not day is defined %}{%- set day = '1 May 2031' %}{%- endif %}
{{- bos_token }}
{%- if extra_tools is defined %}
    {%- set tools = extra_tools %}
{%- endif %}
{%- if not in_user_turn is defined %}
    {%- set in_user_turn = true %}
{%- endif %}

{#- The first message may be the system's. #}
{%- if messages and messages[0]['role'] == 'system' %}
    {%- set preamble = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set preamble = "" %}
{%- endif %}
{{- "[sys]\\n" + "Day: " + day + "\\n" }}
{%- if helpers is defined or tools is not none %}
    {{- "Helpers: " + (helpers | default([])) | reject('equalto', 'shell') | join(", ") + "\\n" }}
{%- endif %}
{%- if tools is not none and not in_user_turn %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n" }}
    {%- endfor %}
{%- endif %}
{{- preamble + "[/sys]" }}
{%- if in_user_turn and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set opening = messages[0]['content'] | trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("tools want a user turn, and there is none") }}
    {%- endif %}
    {{- '[user]\\n' -}}
    {%- for t in tools %}
        {{- t | tojson(indent=2) }}
        {{- "\\n" }}
    {%- endfor %}
    {{- opening + "[/user]" }}
{%- endif %}
{%- for m in messages %}
    {%- if not (m.role == 'python' or m.role == 'tool' or 'tool_calls' in m) %}
        {{- '[' + m['role'] + ']\\n' + m['content'] | trim + '[/' + m['role'] + ']' }}
    {%- elif 'tool_calls' in m %}
        {%- if not m.tool_calls | length == 1 %}
            {{- raise_exception("one call a turn, not " ~ m.tool_calls | length) }}
        {%- endif %}
        {%- set f = m.tool_calls[0].function %}
        {%- if helpers is defined and f.name in helpers %}
            {{- f.name + "(" }}
            {%- for key, val in f.arguments | items %}
                {{- key + '="' ~ val ~ '"' }}
                {%- if not loop.last %}
                    {{- ", " }}
                {%- endif %}
                {%- endfor %}
            {{- ")" }}
        {%- else %}
            {{- '{"call": "' + f.name + '", "with": ' }}
            {{- f.arguments | tojson }}
            {{- "}" }}
        {%- endif %}
    {%- else %}
        {{- "[result]" }}
        {%- if m.content is mapping or m.content is iterable %}
            {{- m.content | tojson }}
        {%- else %}
            {{- m.content }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]\\n' }}
{%- endif %}
"""

# Strict turns counted in a namespace, tools before the last user turn, ids of calls checked (as Mistral does it).
STRICT = """{%- set rest = messages[1:] if messages and messages[0]["role"] == "system" else messages %}
{%- if rest is not sameas none and messages and messages[0]["role"] == "system" %}{%- set rules = messages[0]["content"] %}{%- endif %}
{%- set asked = rest | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.turn = 0 %}
{%- for m in rest %}
    {%- if not (m.role == "tool" or (m.tool_calls is defined and m.tool_calls is not none)) %}
        {%- if (m["role"] == "user") != (ns.turn % 2 == 0) %}
            {{- raise_exception("turn " ~ loop.index ~ " is out of order") }}
        {%- endif %}
        {%- set ns.turn = ns.turn + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in rest %}
    {%- if m["role"] == "user" %}
        {%- if tools is not none and (m == asked[-1]) %}
            {{- "<tools>[" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{' }}
                {%- for key, val in tool.items() if key != "items" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}" }}
                {{- ", " if not loop.last else "]" }}
            {%- endfor %}
            {{- "</tools>" }}
            {%- endif %}
        {%- if loop.last and rules is defined %}
            {{- "<ask>" + rules + "\\n\\n" + m["content"] + "</ask>" }}
        {%- else %}
            {{- "<ask>" + m["content"] + "</ask>" }}
        {%- endif %}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {%- for c in m.tool_calls %}
            {%- set out = c.function|tojson %}
            {{- out[:-1] }}
            {%- if not c.id is defined or c.id|length != 9 %}
                {{- raise_exception("a call's id has nine characters") }}
            {%- endif %}
            {{- ', "id": "' + c.id + '"}' }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m["role"] == "assistant" %}
        {{- " " + m["content"]|trim + eos_token}}
    {%- else %}
        {%- if m.content is defined and m.content.content is defined %}
            {%- set content = m.content.content %}
        {%- else %}
            {%- set content = m.content %}
        {%- endif %}
        {{- '{"result": ' + content|string + ', "id": "' + m.tool_call_id + '"}' }}
    {%- endif %}
{%- endfor %}
"""

# Everything on one line, roles renamed (as Gemma does it).
RENAMED = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns here') }}{% endif %}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}{% if (m['role'] == 'assistant') %}{% set who = 'bot' %}{% else %}{% set who = m['role'] %}{% endif %}{{ '<' + who + '>
' + m['content'] | trim + '<.>
' }}{% endfor %}{% if add_generation_prompt %}{{'<bot>
'}}{% endif %}"""

# Content as parts, tags that strip on both sides (as Gemma 3 does it).
PARTS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for m in turns -%}
    {{ '<' + m['role'] + '>\\n' + (prefix if loop.first else "") }}
    {%- if m['content'] is string -%}
        {{ m['content'] | trim }}
    {%- elif m['content'] is iterable -%}
        {%- for part in m['content'] -%}
            {%- if part['type'] == 'image' -%}
                {{ '<picture>' }}
            {%- elif part['type'] == 'text' -%}
                {{ part['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("content of no known kind") }}
    {%- endif -%}
    {{ '<.>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<bot>\\n'}}
{%- endif -%}
"""

# State in a namespace over one long line, thoughts cut off (as DeepSeek does it).
STATEFUL = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set s = namespace(called=false, results=false, rules='', first=true) %}{%- for m in messages %}{%- if m['role'] == 'system' %}{%- if s.first %}{% set s.rules = s.rules ~ m['content'] %}{% set s.first = false %}{%- else %}{% set s.rules = s.rules ~ '\\n' ~ m['content'] %}{%- endif %}{%- endif %}{%- endfor %}{{ bos_token }}{{ s.rules }}{%- for m in messages %}{%- if m['role'] == 'user' %}{%- set s.results = false -%}{{'<U>' ~ m['content']}}{%- endif %}{%- if m['role'] == 'assistant' and 'tool_calls' in m %}{%- for c in m['tool_calls'] %}{%- if not s.called %}{%- if m['content'] is none %}{{'<C>' + c['type'] + '\\n```json\\n' + c['function']['arguments'] | tojson + '\\n```'}}{%- else %}{{'<A>' + m['content'] + '<C>' + c['function']['name']}}{%- endif %}{%- set s.called = true -%}{%- else %}{{'\\n' + c['function']['name']}}{%- endif %}{%- endfor %}{{'<E>'}}{%- endif %}{%- if m['role'] == 'assistant' and 'tool_calls' not in m %}{%- if s.results %}{{'<R>' + m['content'] + '<E>'}}{%- set s.results = false -%}{%- else %}{% set content = m['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{'<A>' + content + '<E>'}}{%- endif %}{%- endif %}{%- if m['role'] == 'tool' %}{%- set s.results = true -%}{{'<T>' + m['content']}}{%- endif %}{%- endfor -%}{% if add_generation_prompt and not s.results %}{{'<A>'}}{% endif %}"""

# A recursive macro over JSON schemas, neighbours of a turn through the loop (as Hermes does it).
TYPED = """{%- macro type_of(spec) %}
{%- set names = {
    "string": "str",
    "number": "float",
    "integer": "int"
} %}

{%- if names[spec.type] is defined %}
    {{- names[spec.type] }}
{%- elif spec.type == "array" %}
    {{- "list[" +  type_of(spec["items"]) + "]"}}
{%- elif spec.type == "object" %}
    {%- if spec.additionalProperties is defined %}
        {{- "dict[" + type_of(spec.additionalProperties) + ']'}}
    {%- else %}
        {{- "dict" }}
    {%- endif %}
{%- elif spec.type is iterable and spec.type is not string %}
    {%- for t in spec.type %}
      {{- type_of({"type": t}) }}
      {%- if not loop.last %}
        {{- "|" }}
    {%- endif %}
    {%- endfor %}
{%- else %}
    {{- "Any" }}
{%- endif %}
{%- endmacro %}

{{- bos_token }}
{%- for tool in tools or [] %}
    {%- if tool.function is defined %}
        {%- set tool = tool.function %}
    {%- endif %}
    {{- tool.name + '(' }}
    {%- for name, spec in tool.parameters.properties|items %}
        {{- name + ": " + type_of(spec) }}
        {%- if not loop.last %}
            {{- ", " }}
        {%- endif %}
    {%- endfor %}
    {{- ")" }}
    {%- if tool.return is defined %}
        {{- " -> " + type_of(tool.return) }}
    {%- endif %}
    {%- for name, spec in tool.parameters.properties|items %}
        {%- if loop.first %}
            {{- "\\n  where:\\n" }}
        {%- endif %}
        {{- "  " + name + ": " + (spec.description|default('-'))|trim + "\\n" }}
    {%- endfor %}
    {{- type_of({"type": "array", "items": {"type": ["string", "null"]}}) ~ type_of({"type": "object", "additionalProperties": {"type": "number"}}) }}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == "user" or m.role == "system" or (m.role == "assistant" and m.tool_calls is not defined) %}
        {{- '<' + m.role + '>' ~ m.content ~ '</>' + '\\n' }}
    {%- elif m.role == "assistant" %}
    {%- for c in m.tool_calls %}
       {{- '\\n<call>\\n' }}           {%- if c.function is defined %}
            {%- set c = c.function %}
        {%- endif %}
        {{- '{"name": "' + c.name + '", ' }}
        {%- if c.arguments is defined %}
            {%- if c.arguments is string %}
                {{- c.arguments }}
            {%- else %}
                {{- c.arguments|tojson }}
            {%- endif %}
        {%- endif %}
        {{- '}' }}
    {%- endfor %}
    {%- elif m.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}
            {{- '<tool>\\n' }}
        {%- endif %}
        {{- m.content }}
        {%- if not loop.last and loop.nextitem.role != "tool" %}
            {{- '</tool>' }}
        {%- elif loop.last %}
            {{- '</tool>.' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<assistant>' }}
{%- endif %}
"""

# A system turn put in when there is none, line breaks within the tags (as SmolLM2 and Phi do it).
PLAIN = """{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<system>
Be of help.</>
' }}{% endif %}{{'<' + m['role'] + '>
' ~ m['content'] ~ '</>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>
' }}{% else %}{{ eos_token }}{% endif %}"""

CALL = {"id": "call12345", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln", "n": 2}}}
CHATS = [
    [{"role": "user", "content": " Hi "}],
    [{"role": "system", "content": " Sys "}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>x</think> b "}, {"role": "user", "content": "c\nd"}],
    [{"role": "user", "content": "w?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "{\"t\": 1}", "tool_call_id": "call12345"}, {"role": "assistant", "content": "warm"}, {"role": "user", "content": "ok"}],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    [{"role": "system", "content": [{"type": "text", "text": "S"}]}, {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " look "}]}],
    [],
]
for template in (DATED, STRICT, RENAMED, PARTS, STATEFUL, TYPED, PLAIN):
    for chat in CHATS:
        for tools, extra in ((None, {}), ([TOOL], {"in_user_turn": False}), ([TOOL], {"helpers": ["get_weather", "shell"]})):
            CASES.append((template, {"messages": chat, "tools": tools, "documents": None, "add_generation_prompt": tools is None,
                                     "bos_token": "<s>", "eos_token": "</s>", **extra}))

"""Chat templates that try to take unlimited time or memory, by what they use for it."""

LOOP = "{% for i in range(99999) %}"
END = "{% endfor %}"
LONG = "{% set a = 'a' * 8000000 %}"
# Integers with equal hashes, as Python hashes modulo 2 ** 61 - 1
COLLIDING = (
    "{% set text %}{% for i in range(99999) %}{{ i * (2 ** 61 - 1) }} {% endfor %}{% endset %}"
    "{% set k = text.split() | map('int') | list %}"
)


TEMPLATES = {
    # filters and tests that loop
    "reject in": "{% set x = ('a' * 99999) | list %}{{ range(100000) | reject('in', x) | list | length }}",
    "reject in text": LONG + "{{ range(100000) | map('string') | reject('in', a) | list | length }}",
    "select first": "{% set x = range(99999) | list %}{{ range(100000) | map('string') | select('in', x) | first }}",
    "map replace": "{{ range(100000) | map('replace', '1', 'b' * 1000000) | list | length }}",
    "map string": LONG + "{{ range(100000) | map('replace', '9', a) | map('string') | join | length }}",
    "map indent": "{{ range(100000) | map('indent', 1000000, true) | list | length }}",
    "map join": LONG + "{{ range(99999) | map('string') | map('join', a) | list | length }}",
    "map tojson": "{{ [range(99999) | list] * 50 | map('tojson') | list | length }}",
    "map default": LONG + "{{ range(99999) | map('default', a) | map('upper') | list | length }}",
    "map list": "{{ (['a' * 99999] * 80) | map('list') | map('list') | map('list') | list | length }}",
    "map map": "{{ ([range(99999)] * 999) | map('map', 'string') | map('list') | list | length }}",
    "map sort": "{{ ([range(99999)] * 999) | map('sort', true) | map('first') | list | length }}",
    "map attribute": "{{ range(99999) | map(attribute='a.' * 4000000, default={'a': 1}) | list }}",
    "selectattr": "{{ [{'a': {'a': 1}}] * 99999 | selectattr('a.' * 4000000) | list }}",
    "sort attribute": "{{ ([{'a': 1}] * 99999) | sort(attribute='a,' * 4000000) | list | length }}",
    "join attribute": "{{ ([{'a': 1}] * 99999) | join('', 'a.' * 4000000) }}",
    "unique": COLLIDING + "{{ k | unique | list | length }}",
    "unique nested": LOOP + "{% set x = (range(99999) | unique | list) %}" + END,
    "max nested": LOOP + "{% set x = range(99999) | map('string') | max %}" + END,
    "test odd formats": "{{ '%1900000000d' is odd }}",
    "test even formats": "{{ ['%1900000000d'] | select('even') | list }}",
    "test divisibleby formats": "{{ '%1900000000d' is divisibleby(3) }}",
    "compare text": LONG + "{% set b = a ~ 'b' %}{{ " + " or ".join(["b in a"] * 9000) + " }}",
    "compare lists": "{% set x = range(99999) | list %}{% set y = x + [1] %}{{ "
    + " or ".join(["x == y"] * 9000)
    + " }}",
    "compare in list": "{% set x = range(99999) | list %}{{ " + " or ".join(["-1 in x"] * 9000) + " }}",
    "compare chain": "{% set x = range(99999) | list %}{{ x" + " == x" * 9000 + " }}",
    # methods of strings
    "rfind": "{% set a = 'a' * 8000000 %}{{ a.rfind('ab' ~ a[:4000000]) }}",
    "rindex": "{% set a = 'a' * 8000000 %}{{ a.rindex('ab' ~ a[:4000000]) }}",
    "rpartition": "{% set a = 'a' * 8000000 %}{{ a.rpartition('ab' ~ a[:4000000]) | length }}",
    "rsplit": "{% set a = 'a' * 8000000 %}{{ a.rsplit('ab' ~ a[:4000000]) | length }}",
    "strip": LONG + "{{ a.strip('b' * 4000000 ~ 'a') | length }}",
    "lstrip": LONG + "{{ a.lstrip('b' * 4000000 ~ 'a') | length }}",
    "trim": LONG + "{{ a | trim('b' * 4000000 ~ 'a') | length }}",
    "count": LOOP + LONG + "{{ a.count('a' * 99 ~ 'b') }}" + END,
    "split": "{{ ('ab ' * 2700000).split() | length }}",
    "split wide": "{{ ('\U0001f600,' * 4000000).split(',') | length }}",
    "split again": "{% set x = 'ab ' * 90000 %}{% set ns = namespace(l=[]) %}"
    + LOOP
    + "{% set ns.l = [ns.l, x.split()][-1:] %}"
    + END,
    "splitlines": "{{ ('ab\n' * 2700000).splitlines() | length }}",
    "list of text": "{{ ('\U0001f600' * 8000000) | list | length }}",
    "sort of text": "{{ ('\U0001f600' * 8000000) | sort | length }}",
    "title": "{{ ('ab ' * 2700000) | title | length }}",
    "indent": "{{ ('ab\n' * 2700000) | indent(0) | length }}",
    "indent at other line ends": "{{ ('a\x0b' * 500000) | indent('x' * 1000000) | length }}",
    "wide text": LOOP + "{% set x = '\U0001f600' * 8000000 %}" + END,
    "wide texts": "".join(f"{{% set x{i} = '\U0001f600' * 8000000 %}}" for i in range(99)),
    "escape": LOOP + "{% set x = ('<' * 8000000) | escape %}" + END,
    "escaped sums": "{% set x = '' | escape %}{% set x = x + '\"' * 8000000 %}{% set x = x + x %}{{ x | length }}",
    "autoescape": "{% autoescape true %}" + "{{ '\"' * 8000000 }}" * 60 + "{% endautoescape %}",
    "repr": "{{ [2 ** 2000] * 500000 }}",
    "repr of text": "{{ ['\U000e0001' * 8000000] | string | length }}",
    "tojson escapes": "{{ ['\U000e0001' * 8000000] | tojson(ensure_ascii=true) | length }}",
    "tojson separators": "{{ range(99999) | list | tojson(separators=('x' * 1000000, 'y' * 1000000)) | length }}",
    "format": "{{ ('{0}' * 2000000).format('x' * 1000000) }}",
    "format nothing": LOOP + "{{ ('{}{{' * 1000000).format('') }}" + END,
    # numbers
    "power": "{{ 9 ** 9 ** 9 }}",
    "negative power": "{{ 2 ** -(10 ** 9) }}{{ 10 ** 10 ** 10 }}",
    "square": "{% set ns = namespace(x=9) %}" + LOOP + "{% set ns.x = ns.x * ns.x %}" + END,
    "digits": "{{ ('9' * 8000000) | int }}",
    "float digits": LOOP + "{{ ('9' * 8000000) | float }}" + END,
    "base 36": "{{ ('z' * 8000000) | int(0, 36) }}",
    "many numbers": "{{ range(99999) | map('string') | map('int', 0, 36) | list | tojson | length }}" * 99,
    # equal hashes
    "colliding dict": COLLIDING + "{% set ns = namespace(p=[]) %}{{ dict(k | map('string') | map('list')) | length }}",
    "colliding pairs": COLLIDING + "{{ dict(k | map('int') | map('default') | unique | sort | map('tojson')) }}",
    "colliding literal": "{% set k = 2 ** 61 - 1 %}"
    + LOOP
    + "{% set x = {"
    + ",".join(f"k*{i}:1" for i in range(5000))
    + "} %}"
    + END,
    "colliding keys": "{% set k = 2 ** 61 - 1 %}{% set x = {"
    + ",".join(f"k*{i}:1" for i in range(5000))
    + "} %}"
    + LOOP
    + "{{ x.keys() - [] }}{{ x.keys() == x.keys() }}"
    + END,
    # nesting and recursion
    "deep tuple": "{% set ns = namespace(x=(1,)) %}" + LOOP + "{% set ns.x = (ns.x,) %}" + END + "{{ {ns.x: 1} }}",
    "deep list": "{% set ns = namespace(x=[1]) %}" + LOOP + "{% set ns.x = [ns.x] %}" + END + "{{ ns.x == ns.x }}",
    "deep dict": "{% set ns = namespace(x={}) %}" + LOOP + "{% set ns.x = {1: ns.x} %}" + END + "{{ ns.x | tojson }}",
    "recursive macro": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "doubling macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive caller": "{% macro f(n) %}{{ caller() }}{% if n %}{% call f(n - 1) %}{{ n }}{{ f(n - 1) }}{% endcall %}"
    "{% endif %}{% endmacro %}{% call f(40) %}x{% endcall %}",
    "recursive loop": "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "recursive loop without output": "{% for a in range(9999) recursive %}"
    "{% set x = loop(range(9999)) if loop.depth < 9 %}{% endfor %}",
    "recursive block": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "blocks": "{% block a %}" + "x" * 60000 + "{% endblock %}" + "{{ self.a() }}" * 4000,
    "nested loops": LOOP * 15 + END * 15,
    "loop with condition": "{% for a in range(99999) if range(99999) | list | length < 0 %}{% endfor %}",
    "loop length": "{% set x = range(99999) | list %}"
    + LOOP
    + "{% for b in x %}{{ loop.length }}{% break %}{% endfor %}"
    + END,
    "unpacking": LOOP + "{% set a, b = range(99999) | map('string') | list %}" + END,
    "starred arguments": "{% macro f() %}{{ varargs | length }}{% endmacro %}" + LOOP + "{{ f(*range(99999)) }}" + END,
    "set block": "{% set ns = namespace(x='ab') %}"
    + LOOP
    + "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}"
    + END,
    "filter block": "{% filter replace('a', 'aaaaaaaa' * 999) %}" * 9 + "a" + "{% endfilter %}" * 9,
    "cycle": LOOP + "{{ loop.cycle(*range(99999)) }}" + END,
    "changed": LOOP + "{% if loop.changed(range(99999) | list) %}{% endif %}" + END,
    "namespace": LOOP + "{% set ns = namespace(range(99999) | map('list')) %}" + END,
    # time
    "strftime width": "{{ strftime_now('%190000000d') }}",
    "strftime flag and width": "{{ strftime_now('%-_190000000Y') }}",
    "strftime long": "{{ strftime_now('%c' * 4000000) }}",
    # compiling
    "parentheses": "{{ " + "(" * 60000 + ")" * 60000 + " }}",
    "brackets": "{{ " + "[" * 60000 + "]" * 60000 + " }}",
    "nested if": "{% if a %}" * 6000 + "{% endif %}" * 6000,
    "elif": "{% if a %}" + "{% elif a %}" * 10000 + "{% endif %}",
    "many set": "".join(f"{{% set a{i} = 1 %}}" for i in range(6000)),
    "many if with names": "".join(f"{{% if a{i} %}}{{% set b{i}=1 %}}{{% endif %}}" for i in range(3000)),
    "many loops": "{% for a in b %}{% endfor %}" * 4600,
    "many macros": "".join(f"{{% macro f{i}() %}}{{% endmacro %}}" for i in range(3500)),
    "nested macros": "{% macro f() %}" * 200 + "{{ a }}" * 15000 + "{% endmacro %}" * 200,
    "many blocks": "".join(f"{{% block b{i} %}}{{% endblock %}}" for i in range(3500)),
    "many outputs": "{{ a }}{{ b }}" * 9000,
    "many comparisons": "{{ " + "a<" * 60000 + "a }}",
    "many sums": "{{ " + "a+" * 60000 + "a }}",
    "many concatenations": "{{ " + "a~" * 60000 + "a }}",
    "many attributes": "{{ a" + ".a" * 60000 + " }}",
    "many filters": "{{ a" + "|e" * 60000 + " }}",
    "many calls": "{{ a" + "()" * 60000 + " }}",
    "many conditions": "{{ " + "a if a else " * 10000 + "a }}",
    "many negations": "{{ " + "not " * 30000 + "a }}",
    "many minus": "{{ " + "-" * 120000 + "1 }}",
    "many elements": "{% set x = [" + "1," * 60000 + "] %}",
    "many pairs": "{% set x = {" + "1:1," * 30000 + "} %}",
    "many arguments": "{{ f(" + "a," * 60000 + ") }}",
    "many keywords": "{{ f(" + ",".join(f"a{i}=1" for i in range(12000)) + ") }}",
    "many names": "{{ " + "~".join(f"a{i}" for i in range(15000)) + " }}",
    "many targets": "{% set " + ",".join(f"a{i}" for i in range(15000)) + " = x %}",
    "long digits": "{{ " + "1" * 120000 + " }}",
    "digits and underscores": "{{ " + "1_" * 60000 + " }}",
    "float with underscores": "{{ 1." + "1_" * 60000 + "e }}",
    "open text": "{{ '" + "\\'" * 60000,
    "open comments": "{#" * 60000,
    "open raw": "{% raw %}" + "{% endra" * 16000,
    "spaces": "{{" + " " * 120000 + "}",
    "lines": "\n" * 120000 + "{%",
    "spaces before blocks": (" " * 2000 + "{% set a = 1 %}") * 60,
    "braces": "{" * 120000,
    "constants": "{{ " + "~".join(["'" + "x" * 60 + "'"] * 1900) + " }}",
    "constant filters": "{{ ('x' * 8000000) | upper | lower | upper | replace('X', 'Y' * 999) | length }}",
    # data of the template
    "data": LOOP + "x" * 120000 + END,
    "empty outputs": LOOP * 2 + "{{ '' }}" + END * 2,
    "exception of a long text": "{{ raise_exception('x' * 8000000) }}",
    "undefined of a long name": "{{ {}['x' * 8000000].y }}",
}

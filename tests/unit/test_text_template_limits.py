"""What a chat template may not do, and how long it may take."""

from __future__ import annotations

import pytest

from lmdeploy.text.jinja_limits import TemplateFailure
from lmdeploy.text.jinja_sandbox import CompiledTemplate

USER = {"role": "user", "content": "What is 2+2?\nThink."}


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ (messages | attr('__class__')).__base__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% set x = messages.append(1) %}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ range(99999999) }}",
    ],
)
def test_sandbox_escapes_are_refused(source: str) -> None:
    with pytest.raises(TemplateFailure):
        CompiledTemplate(source + "{{ x.y }}").render({"messages": [dict(USER)]})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}", "longer than"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "longer than",
        ),
        (
            "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            "a text of",
        ),
        (
            "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
            "a text of",
        ),
        ("{{ 'ab' * 99999999999 }}", "a text of"),
        ("{{ 9 ** 9 ** 9 }}", "power"),
        ("{{ '%99999999999d' % 1 }}", "width"),
        ("{{ '{:>99999999999}'.format(1) }}", "width"),
        ("{{ 'a'.ljust(99999999999) }}", "a text of"),
        ("{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", "a text of"),
        ("{{ 'x' | center(10 ** 9) }}", "a text of"),
        ("{{ ['x'] | map('center', 10 ** 9) | list }}", "a text of"),
        ("{{ ('a\n' * 100000) | indent(10 ** 5) }}", "a text of"),
        ("{{ ('a' * 10 ** 6) | replace('a', 'b' * 10 ** 4) }}", "a text of"),
        ("{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 4) }}", "a text of"),
        ("{{ (['a'] * 10 ** 5) | join('b' * 10 ** 4) }}", "a text of"),
        ("{{ ([{'k': 'a' * 10 ** 6}] * 100) | join(attribute='k') }}", "a text of"),
        ("{{ ('b' * 10 ** 4).join(['a'] * 10 ** 5) }}", "a text of"),
        ("{{ ('a ' * 10 ** 6) | wordwrap(1, wrapstring='b' * 10 ** 4) }}", "a text of"),
        ("{{ '%s%s%s%s' | format(*(['a' * 10 ** 7] * 4)) }}", "a text of"),
        ("{{ '{0}{0}{0}{0}'.format('a' * 10 ** 7) }}", "a text of"),
        ("{{ ('\t' * 10 ** 6).expandtabs(10 ** 4) }}", "a text of"),
        ("{{ (['a' * 10 ** 6] * 1000) | tojson }}", "a text of"),
        ("{{ ['a' * 10 ** 6] * 1000 }}", "a text of"),
        ("{{ ['a' * 10 ** 6] * 1000 ~ '' }}", "a text of"),
        ("{{ [1] | tojson(indent=10 ** 9) }}", "indent of tojson"),
        ("{{ [1] | batch(10 ** 9, 'x') | list }}", "a list of"),
        ("{{ [1] | slice(10 ** 9) | list }}", "a list of"),
        ("{{ [1] * 10 ** 9 }}", "a list of"),
        ("{{ ([[1]] * 10) | sum(start=[]) }}", "adds numbers only"),
        (
            "{% set n = namespace(s='ab') %}"
            "{% for i in range(60) %}{% set n.s = [n.s] * 2 %}{% endfor %}{{ n.s }}",
            "a list of",
        ),
        (
            "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
            "a list of",
        ),
        (
            "{% set n = namespace(s=9) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
            "a number",
        ),
    ],
)
def test_time_and_size_are_limited(source: str, words: str) -> None:
    with pytest.raises(TemplateFailure, match=words):
        CompiledTemplate(source).render({}, time_limit=0.6)

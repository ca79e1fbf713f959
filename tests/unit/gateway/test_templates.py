"""Chat templates of definitions: what they see, and that none of them holds a process up."""

import asyncio
import resource
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from localai_cluster.kit import clock
from localai_cluster.kit.errors import ClusterError, InvalidInput
from nodes.gateway import templates
from nodes.gateway.generation import Conversation, ConversationMessage

ASKED = Conversation((ConversationMessage("user", "hello"),))


def made(source: str, asked: Conversation = ASKED) -> str:
    return asyncio.run(templates.render(source, asked))


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m() %}{% for b in range(99999) %}{% set x = b %}{% endfor %}{% endmacro %}"
        "{% for a in range(99999) %}{% set x = m() %}{% endfor %}",
        "{% for a in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    ],
    ids=["loops", "macro", "filters", "recursion"],
)
def test_a_template_that_writes_nothing_for_long_is_given_up(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "CPU_LIMIT_SECONDS", 0.1)
    began = clock.monotonic()
    with pytest.raises(InvalidInput, match="too much"):
        made(source)
    assert clock.monotonic() - began < 30


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{{ range(99999) | map('string') | sort | length }}{% endfor %}",
        "{{ 9 ** 999999999 }}",
        "{{ '%1900000000d' % 1 }}",
        "{{ '{:>1900000000}'.format(1) }}",
        "{{ 'x'.center(1900000000) }}",
        "{{ 'x' * 1900000000 }}",
        "{{ ('x' * 99999).replace('', 'y' * 99999) }}",
        "{{ range(99999) | map('string') | join('z' * 99999) }}",
        "{{ [1] | tojson(indent=1900000000) }}",
        "{% set all = namespace(x='x') %}{% for a in range(99) %}{% set all.x = all.x ~ all.x %}{% endfor %}",
    ],
    ids=["sort", "power", "percent", "format", "center", "repeat", "replace", "join", "json", "doubled"],
)
def test_no_single_step_holds_the_server_or_takes_its_memory(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Review X9: `sort` held the interpreter for 74 s, one `%` format took 2 GB."""
    monkeypatch.setattr(templates, "CPU_LIMIT_SECONDS", 0.2)
    before = resource.getrusage(resource.RUSAGE_SELF)

    with pytest.raises(InvalidInput, match="too much"):
        made(source)

    after = resource.getrusage(resource.RUSAGE_SELF)
    # Processor time, not turns of the loop: a busy machine gives the loop few turns.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0, "seconds"
    assert after.ru_maxrss - before.ru_maxrss < 200 * 1024, "KiB"
    assert made("{{ messages[0].content }}") == "hello", "the next prompt has a process again"


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        ("{{ tools | tojson }}", '[{"name": "é", "a": 1}]'),
        ("{{ tools | tojson(ensure_ascii=False) }}", '[{"name": "é", "a": 1}]'),
        ("{{ tools[0] | tojson(separators=(',', ':'), sort_keys=True) }}", '{"a":1,"name":"é"}'),
        ("{{ tools[0].a | tojson(indent=4) }}{{ ['<'] | tojson(indent=1) }}", '1[\n "<"\n]'),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2026"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hello!"),
    ],
)
def test_templates_of_models_find_what_they_call(
    source: str, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `transformers`, for which they are written: a call that fails is a 500 for every chat."""
    monkeypatch.setattr(clock, "now", lambda: datetime(2026, 1, 2, tzinfo=UTC))
    assert made(source, Conversation(ASKED.messages, tools='[{"name":"é","a":1}]')) == prompt


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[templates._TemplateProcess]]:
    """The processes that the test starts; no other test has left one."""
    found: list[templates._TemplateProcess] = []

    class Recorded(templates._TemplateProcess):
        def __init__(self) -> None:
            super().__init__()
            found.append(self)

    monkeypatch.setattr(templates, "_idle_processes", [])
    monkeypatch.setattr(templates, "_TemplateProcess", Recorded)
    yield found
    for process in found:
        process.end()


def test_a_process_that_somebody_killed_costs_no_prompt(started: list[templates._TemplateProcess]) -> None:
    """Review X9: the machine may run out of memory, and what it ends is not the template's fault."""
    assert made("{{ 1 }}") == made("{{ 1 }}") == "1"
    (first,) = started
    first._child.kill()
    first._child.wait()
    assert (made("{{ 1 }}"), len(started)) == ("1", 2)


def test_a_large_web_process_keeps_its_template_process(started: list[templates._TemplateProcess]) -> None:
    """The kernel hands the peak of the parent's memory on to its child."""
    memory = b"x" * (400 * 1024 * 1024)
    assert made("{{ 1 }}") == made("{{ 1 }}") == "1"
    assert (len(started), len(memory)) == (1, 400 * 1024 * 1024)


def test_a_template_that_python_cannot_compile_does_not_end_the_process(
    started: list[templates._TemplateProcess],
) -> None:
    """Jinja compiles to Python, which nests at most 20 loops."""
    loops = 25
    source = "{% for i in [1] %}" * loops + "{% endfor %}" * loops
    with pytest.raises(templates.TemplateUnusable, match="nested"):
        made(source)
    assert (made("{{ 1 }}"), len(started)) == ("1", 1)


def test_a_process_that_does_not_answer_is_given_up(
    started: list[templates._TemplateProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Review X9: a stopped process uses no processor time."""
    assert made("{{ 1 }}") == "1"
    started[0]._child.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(templates, "MAX_WAIT_SECONDS", 0.1)
    with pytest.raises(templates.TemplateUnusable, match="did not answer"):
        made("{{ 1 }}")
    monkeypatch.undo()
    assert made("{{ 1 }}") == "1"
    assert started[0]._child.returncode == -signal.SIGKILL


def test_the_process_has_no_secret_and_gives_its_memory_back(
    started: list[templates._TemplateProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Review X9: a template that leaves its sandbox must not read the server's environment."""
    monkeypatch.setenv("DJANGO_SECRET_KEY", "hidden")
    assert made("{{ 1 }}") == "1"
    environment = Path(f"/proc/{started[0]._child.pid}/environ").read_bytes()
    assert b"hidden" not in environment
    assert len(made("{% set x = 'x' * (300000000 * messages | length) %}{{ x | length }}")) == 9
    assert (made("{{ 1 }}"), len(started)) == ("1", 2)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 99999999999 }}",
        "{{ 99999999999 * 'x' }}",
        "{{ [0] * 99999999999 }}",
        "{{ range(9999999) | list }}",
        "{{ 'x' * 'x' }}",
        "{{ 'x' ** 2 }}",
        "{{ 5 | xmlattr }}",
        "{{ messages[0].role.nothing.at_all }}",
        "{{ messages.clear() }}",
        "{{ ''.__class__.__mro__ }}",
        "{% include 'x' %}",
        "{% for",
    ],
)
def test_a_template_that_cannot_be_used_is_an_error_of_the_definition(source: str) -> None:
    with pytest.raises(ClusterError) as failed:
        made(source)
    assert failed.value.code in ("template_unusable", "invalid_request")


def test_what_no_engine_can_be_sent_is_an_error_of_the_definition() -> None:
    """Half a pair of surrogates is no text."""
    with pytest.raises(ClusterError) as failed:
        made(r"{{ '\ud800' }}")
    assert failed.value.code == "template_unusable"


def test_a_long_conversation_is_made_in_time() -> None:
    source = "{% for m in messages %}{% if m.role == 'user' %}<{{ m.content | trim }}>{% endif %}{% endfor %}"
    assert made(source, Conversation(ASKED.messages * 4096)) == "<hello>" * 4096


def test_reasoning_of_earlier_answers_is_there() -> None:
    said = ConversationMessage("assistant", "yes", reasoning="because")
    assert made("{{ messages[0].reasoning_content }}", Conversation((said,))) == "because"

"""Chat templates of definitions: what they see, and that none of them holds a process up."""

import asyncio
import gc

import pytest

from localai_cluster import clock
from localai_cluster.errors import ClusterError, InvalidInput
from nodes.inference import templates
from nodes.inference.generation import Conversation, Utterance

ASKED = Conversation((Utterance("user", "hello"),))


def made(source: str, asked: Conversation = ASKED) -> str:
    return asyncio.run(templates.prompt(source, asked))


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
    monkeypatch.setattr(templates, "LONGEST", 0.1)
    began = clock.monotonic()
    with pytest.raises(InvalidInput, match="too much"):
        made(source)
    assert clock.monotonic() - began < 30


def test_the_limit_holds_beside_collections_of_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python calls in between swallows errors, and an error of a tracing function ends the tracing."""
    calls: list[str] = []

    def collected(phase: str, told: object) -> None:
        calls.append(phase)

    monkeypatch.setattr(templates, "LONGEST", 0.1)
    before = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        with pytest.raises(InvalidInput, match="too much"):
            made(
                "{% set all = namespace(kept=[]) %}{% for a in range(99999) %}{% set all.kept = [all.kept] %}"
                "{% endfor %}"
            )
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)
    assert calls


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 99999999999 }}",
        "{{ 99999999999 * 'x' }}",
        "{{ [0] * 99999999999 }}",
        "{{ 9 ** 9 ** 9 }}",
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
    said = Utterance("assistant", "yes", reasoning="because")
    assert made("{{ messages[0].reasoning_content }}", Conversation((said,))) == "because"

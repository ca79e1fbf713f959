"""Embeddings and rerank as clients in the field ask for them (review C9, C11)."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from localai_cluster.metrics import web as metrics
from tests.support import hot
from tests.support.answering import DEFINITION, definitions, play, reply
from tests.support.scripted import Refusal, Scripted

__all__ = ["definitions"]
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.rule("http-6b")]

OPENAI, EMBED, OLDER = "/v1/embeddings", "/api/embed", "/api/embeddings"


def asked(path: str, body: dict[str, Any], engine: Scripted | None = None) -> hot.Reply:
    """The reply to one request."""
    answer: hot.Reply = play(
        lambda client, _: reply(client.post(path, {"model": "m", **body})), engine or Scripted()
    )
    return answer


@pytest.mark.parametrize("ids", [[1, 2], [[1, 2], [3]]])
def test_token_ids_of_another_tokenizer_are_refused(ids: list[Any], definitions: Path) -> None:
    """C9: LangChain's default sends those of OpenAI's; the message names its option."""
    other = DEFINITION.replace("name: m", "name: ids") + "token_ids: true\n"
    (definitions / "ids.yaml").write_text(other.replace("{model: m.gguf}", "{model: ids.gguf}"))
    refused = asked(OPENAI, {"input": ids})
    assert refused.status == 400
    assert (refused.body["error"]["param"], refused.body["error"]["code"]) == ("input", "unsupported_value")
    assert "check_embedding_ctx_length=False" in refused.body["error"]["message"]
    accepted = asked(OPENAI, {"model": "ids", "input": ids})
    assert accepted.status == 503, "it would be loaded"


@pytest.mark.parametrize(
    ("path", "body", "truncate"),
    [
        (OPENAI, {"input": "a text"}, "false"),
        (EMBED, {"input": "a text"}, "true"),
        (EMBED, {"input": ["a text"], "truncate": True}, "true"),
        (EMBED, {"input": "a text", "truncate": False}, "false"),
        (OLDER, {"prompt": "a text"}, "true"),
    ],
)
def test_an_engine_is_told_whether_it_may_cut_a_text(path: str, body: dict[str, Any], truncate: str) -> None:
    """C9: OpenAI's dialect never cuts; Ollama's does unless it is told not to."""
    engine = Scripted()
    assert asked(path, body, engine).status == 200
    assert [options.Metadata["truncate"] for options in engine.asked] == [truncate]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (OPENAI, {"input": "long"}, "input"),
        (EMBED, {"input": "long", "truncate": False}, "input"),
        (OLDER, {"prompt": "long"}, "prompt"),
    ],
)
def test_a_text_that_is_too_long_names_the_clients_field(path: str, body: dict[str, Any], field: str) -> None:
    engine = Scripted(embeds=Refusal(grpc.StatusCode.INVALID_ARGUMENT, "Embeddings: the text is too long"))
    refused = asked(path, body, engine)
    assert refused.status == 400
    error = refused.body["error"]
    assert (error["param"] == field) if isinstance(error, dict) else (field in error)


def test_cohere_ranks_documents() -> None:
    """C11: `/v2/rerank`, without the documents' texts."""
    body = {"query": "q", "documents": ["a", "ccc", "bb"], "top_n": 2, "max_tokens_per_doc": 9}
    ranked = asked("/v2/rerank", body).body
    assert [entry["index"] for entry in ranked["results"]] == [1, 2]
    assert all(set(entry) == {"index", "relevance_score"} for entry in ranked["results"])
    assert ranked["meta"]["api_version"] == {"version": "2"}


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        (OPENAI, {"input": ["one", "two"]}, 6),
        (EMBED, {"input": "one"}, 3),
        (OLDER, {"prompt": "one"}, 3),
        ("/v1/rerank", {"query": "q", "documents": ["a", "b"]}, 9),
        ("/v2/rerank", {"query": "q", "documents": ["a", "b"]}, 9),
    ],
)
def test_the_figures_of_a_model_have_the_tokens_of_texts(
    path: str, body: dict[str, Any], tokens: int
) -> None:
    """The figures have the tokens of all prompts: those of a model for vectors were always 0."""

    async def scenario(client: hot.Client, _: Any) -> metrics.ModelCounts:
        metrics.take_model_counts()
        assert (await reply(client.post(path, {"model": "m", **body}))).status == 200
        return metrics.take_model_counts()["m"]

    counts = play(scenario, Scripted())
    assert (counts.requests, counts.prompt_tokens, counts.completion_tokens) == (1, tokens, 0)

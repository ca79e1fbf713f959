"""LangChain: OpenAI's dialects, tools, structured output and embeddings."""

import os
from typing import Any

import openai
import pydantic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_openai.chat_models.base import OpenAIModelNotFoundError
from playing import ASK, CALLED, CITY, KEY, SAID, URL, play, raises

IS_STORED = os.environ["SDK_STORE"] == "1"
CLIENT: dict[str, Any] = {"model": "m", "base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0}
chats = [ChatOpenAI(**CLIENT), ChatOpenAI(**CLIENT, use_responses_api=True)]


class City(pydantic.BaseModel):
    """What the model shall answer with."""

    name: str
    people: int


@tool  # type: ignore[untyped-decorator]
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sun in {city}"


def chat() -> None:
    """Whole and in pieces, with what it took."""
    for model in chats:
        answer = model.invoke(ASK)
        assert (answer.text, answer.usage_metadata["output_tokens"]) == (SAID, 5)
        assert "".join(piece.text for piece in model.stream(ASK)) == SAID


def tools() -> None:
    """A call and its result."""
    for model in chats:
        for choice in ("auto", "any", "weather"):
            bound = model.bind_tools([weather], tool_choice=choice)
            said: list[Any] = [HumanMessage(ASK)]
            said.append(bound.invoke(said))
            (call,) = said[-1].tool_calls
            assert (call["name"], call["args"]) == ("weather", CALLED)
            result = weather.invoke(call)
            assert isinstance(result, ToolMessage)
            assert bound.invoke([*said, result]).text == SAID


def structured() -> None:
    """An answer of a schema."""
    for model in chats:
        assert model.with_structured_output(City, method="json_schema").invoke(ASK) == City(**CITY)


def turns() -> None:
    """The second turn of a conversation, which is stored on the server or not."""
    model = ChatOpenAI(**CLIENT, use_responses_api=True, use_previous_response_id=IS_STORED)
    said: list[Any] = [HumanMessage(ASK)]
    said.append(model.invoke(said))
    assert isinstance(said[-1], AIMessage)
    assert model.invoke([*said, HumanMessage("And now?")]).text == SAID


def embeddings() -> None:
    """Texts; by default this client sends token ids of OpenAI's models, which is refused."""
    vectors = OpenAIEmbeddings(**CLIENT, check_embedding_ctx_length=False)
    assert [len(vector) for vector in vectors.embed_documents(["one", "two"])] == [2, 2]
    ids = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    refused = raises(openai.BadRequestError, lambda: ids.embeddings.create(model="m", input=[[1, 2]]))
    assert "check_embedding_ctx_length=False" in refused.message


def errors() -> None:
    """Refusals: it knows a missing model by OpenAI's code."""
    other = ChatOpenAI(**CLIENT | {"model": "none"})
    raises(OpenAIModelNotFoundError, lambda: other.invoke(ASK))


play(chat, tools, structured, turns, embeddings, errors)

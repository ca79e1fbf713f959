"""LiteLLM as a client of each of our dialects."""

import json
from typing import Any

import litellm
from playing import ASK, BREAK, CALLED, CITY, FAIL, KEY, PLACE, SAID, SCHEMA, URL, play, raises

TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
OPENAI = {"model": "openai/m", "api_base": f"{URL}/v1"}
DIALECTS: tuple[dict[str, str], ...] = (
    OPENAI,
    {"model": "anthropic/m", "api_base": URL},
    {"model": "ollama_chat/m", "api_base": URL},
)
BROKEN_OFF = litellm.exceptions.MidStreamFallbackError
litellm.telemetry = False
litellm.suppress_debug_info = True


def ask(dialect: dict[str, str], text: str = ASK, **more: Any) -> Any:
    """An answer."""
    wish = {**dialect, "api_key": KEY, "messages": [{"role": "user", "content": text}], "num_retries": 0}
    return litellm.completion(**wish | {"max_tokens": 64} | more)


def chat() -> None:
    """A whole answer and what it took, in every dialect."""
    for dialect in DIALECTS:
        answer = ask(dialect, temperature=0, stop=["\n\n"])
        assert answer.choices[0].message.content == SAID, dialect
        assert answer.choices[0].finish_reason == "stop", dialect
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 5), dialect


def stream() -> None:
    """The pieces."""
    for dialect in DIALECTS:
        chunks = list(ask(dialect, stream=True, stream_options={"include_usage": True}))
        said = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
        assert said == SAID, dialect
        assert chunks[-1].usage.completion_tokens == 5, dialect


def tools() -> None:
    """A call, whole and streamed, and its result."""
    for dialect in DIALECTS:
        answer = ask(dialect, tools=[TOOL]).choices[0].message
        (call,) = answer.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", CALLED), dialect
        built = litellm.stream_chunk_builder(list(ask(dialect, tools=[TOOL], stream=True)))
        (streamed,) = built.choices[0].message.tool_calls
        assert json.loads(streamed.function.arguments) == CALLED, dialect
        result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
        said = [{"role": "user", "content": ASK}, answer.model_dump(), result]
        assert ask(dialect, tools=[TOOL], messages=said).choices[0].message.content == SAID, dialect


def structured() -> None:
    """JSON of a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    for dialect in (OPENAI, DIALECTS[2]):
        assert json.loads(ask(dialect, response_format=form).choices[0].message.content) == CITY, dialect


def responses() -> None:
    """OpenAI's newer dialect."""
    answer = litellm.responses(**OPENAI, api_key=KEY, input=ASK)
    assert answer.output[0].content[0].text == SAID
    events = list(litellm.responses(**OPENAI, api_key=KEY, input=ASK, stream=True))
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == SAID


def embeddings() -> None:
    """Vectors. To Ollama's route LiteLLM sends no key."""
    answer = litellm.embedding(**OPENAI, api_key=KEY, input=["one", "two"])
    assert [len(one["embedding"]) for one in answer.data] == [2, 2]


def errors() -> None:
    """Refusals, and streams that break off."""
    # An engine that cannot now: what LiteLLM makes of Anthropic's `overloaded_error` is the second.
    for dialect, busy in zip(
        DIALECTS, (litellm.ServiceUnavailableError, litellm.InternalServerError), strict=False
    ):
        prefix = dialect["model"].removesuffix("m")
        raises(litellm.NotFoundError, lambda d=dialect, p=prefix: ask(d, model=f"{p}none"))
        raises(litellm.BadRequestError, lambda d=dialect: ask(d, top_p=3))
        raises(litellm.AuthenticationError, lambda d=dialect: ask(d, api_key="wrong"))
        raises(busy, lambda d=dialect, p=prefix: ask(d, model=f"{p}cold"))
        raises(busy, lambda d=dialect: ask(d, FAIL))
    # Of Ollama's dialect LiteLLM does not know the line that tells an error.
    for dialect in DIALECTS[:2]:
        broken = raises(BROKEN_OFF, lambda d=dialect: list(ask(d, BREAK, stream=True)))
        assert "out of ideas" in str(broken), dialect


play(chat, stream, tools, structured, responses, embeddings, errors)

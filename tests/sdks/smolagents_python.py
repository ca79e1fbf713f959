"""smolagents: an agent that calls tools until it has an answer."""

from playing import ASK, CALLED, KEY, SAID, URL, play
from smolagents import ChatMessage, OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(model_id="m", api_base=f"{URL}/v1", api_key=KEY, client_kwargs={"max_retries": 0})
asked: list[str] = []


@tool  # type: ignore[untyped-decorator]
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    asked.append(city)
    return "sun"


def chat() -> None:
    """One answer, whole and in pieces."""
    said = [ChatMessage(role="user", content=[{"type": "text", "text": ASK}])]
    assert model(said).content == SAID
    assert "".join(delta.content or "" for delta in model.generate_stream(said)) == SAID


def agent() -> None:
    """Each step must call a tool: first ours, then the one that ends the run."""
    for stream in (False, True):
        asked.clear()
        made = ToolCallingAgent(
            tools=[weather], model=model, max_steps=3, stream_outputs=stream, verbosity_level=0
        )
        assert made.run(ASK) == SAID
        assert asked == [CALLED["city"]]


play(chat, agent)

"""Tools in OpenAI's form, which engines expect: validation, and the tool choice. Pure."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from localai_cluster.kit.errors import InvalidInput
from nodes.gateway import schemas

MOST_TOOLS = 128
Name = Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class Function(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool."""

    function: Function
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, frozen=True):
    """The name of one of the tools."""

    name: str


class ForcedTool(msgspec.Struct, frozen=True):
    """This tool must be called."""

    function: FunctionName
    type: Literal["function"] = "function"


Tools = Annotated[list[Tool], msgspec.Meta(max_length=MOST_TOOLS)]
Choice = Literal["none", "auto", "required"] | ForcedTool


def check_tools(
    tools: Sequence[Tool], choice: Choice | None, schema: str = "function.parameters"
) -> tuple[str, str]:
    """Validate the tools and the choice; return both in the form for engines.

    The tools are JSON, the choice is a word or OpenAI's JSON object. Both are "" if no tool may be called.
    `schema` is the path of the schema within a tool in the client's request. Raises InvalidInput.
    """
    tool_names = {tool.function.name for tool in tools}
    if isinstance(choice, ForcedTool) and choice.function.name not in tool_names:
        raise InvalidInput("tool_choice: names none of `tools`", field="tool_choice")
    if choice == "required" and not tool_names:
        raise InvalidInput("tool_choice: there are no `tools`", field="tool_choice")
    schemas.check(
        (tool.function.parameters or {}, f"tools[{number}].{schema}") for number, tool in enumerate(tools)
    )
    if not tool_names or choice == "none":
        return "", ""
    if isinstance(choice, ForcedTool):
        return encode_json(tools), encode_json(choice)
    return encode_json(tools), choice or "auto"


def encode_json(value: object) -> str:
    """Return the JSON of a value; structs are supported."""
    return msgspec.json.encode(value).decode()

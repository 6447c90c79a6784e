"""The bodies of requests: which fields are known, what they may hold, which are refused."""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moepack.tools.serving.errors import ApiError, invalid

__all__ = ["ChatBody", "CompletionBody", "Message", "SamplingBody", "parse_body"]

B = TypeVar("B", bound="SamplingBody")
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
# Fields of OpenAI's that are known here and not supported, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
}
FIRST: Any = Field(fail_fast=True)  # a long list has a problem at each place, each told at length
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
# Instead of what pydantic says of a field that may be of several kinds.
WORDS = {
    "stop": "a text or at most 16, each of 1 to 1,000 characters",
    "prompt": "a text, or a list of one text or of tokens",
    "content": "a text, or a list of parts, each with a type and a text",
}
KINDS = {"model_type": "an object is wanted", "dict_type": "an object is wanted"}


class Part(BaseModel):
    """A piece of a message's content."""

    model_config = ConfigDict(strict=True)
    type: str
    text: str | None = None


class Message(BaseModel):
    """One message; fields that only a chat template knows are kept for it."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], FIRST] | None = None
    tool_calls: Annotated[list[dict[str, Any]], FIRST] | None = None


class StreamOptions(BaseModel):
    """How to stream."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class SamplingBody(BaseModel):
    """What both kinds of request have. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16), FIRST] | None = None
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    top_p: Fraction = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Fraction = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_means_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        """The most tokens of an answer; None for what the context leaves."""
        return self.max_tokens


class ChatBody(SamplingBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1), FIRST]
    tools: Annotated[list[dict[str, Any]], FIRST] = []
    tool_choice: Literal["none", "auto"] = "auto"
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None

    @property
    def usable_tools(self) -> list[dict[str, Any]]:
        """The tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def token_limit(self) -> int | None:
        """As of every body; the newer name of the field wins."""
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(SamplingBody):
    """The body of /v1/completions: a text, or its tokens."""

    prompt: str | Annotated[list[str], Field(min_length=1), FIRST] | Annotated[list[int], FIRST]

    @property
    def token_limit(self) -> int | None:
        """As of every body."""
        return self.max_tokens or COMPLETION_TOKENS


def parse_body(data: bytes | bytearray, kind: type[B]) -> B:
    """The body as an object of `kind`. Raises ApiError naming the field at fault."""
    try:
        body = json.loads(data)
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise invalid("the body has half a surrogate pair, which is no text") from error
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise invalid("the body is not a JSON object")
    for name, harmless in UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and not any(_is_same(value, one) for one in harmless):
            raise invalid(f"{name}: not supported by this server", name, "unsupported_parameter")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _as_api_error(error) from error


def _is_same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def _as_api_error(error: ValidationError) -> ApiError:
    """The first of the problems, by the names of JSON."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    steps = first["loc"]
    several = next((n for n, step in enumerate(steps) if step in WORDS), None)
    named = steps if several is None else steps[: several + 1]
    text = KINDS.get(first["type"], first["msg"])
    if several is not None:
        text = WORDS[str(steps[several])]
    where = ".".join(str(step) for step in named)
    return invalid(f"{where}: {text}", str(steps[0]) if steps else None)

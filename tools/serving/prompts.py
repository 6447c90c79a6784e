"""From a request to the tokens of its prompt."""

import inspect
from typing import Any

from mlx_lm.server import process_message_content
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from moepack.formats.errors import SourceError
from moepack.tools.answering import prompt_tokens
from moepack.tools.serving.bodies import ChatBody, CompletionBody, Message
from moepack.tools.serving.errors import invalid, too_long

__all__ = ["chat_tokens", "completion_tokens"]

# What a request may not set for the template: among them is a template of its own, a program.
RESERVED = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}


def chat_tokens(tokenizer: TokenizerWrapper, body: ChatBody, most_bytes: int | None) -> list[int]:
    """The tokens of a conversation. Raises ApiError, of more than `most_bytes` of text too."""
    if not tokenizer.has_chat_template:
        text = "this model has no chat template; use /v1/completions"
        raise invalid(text, "messages", "no_chat_template")
    if refused := sorted(RESERVED & body.chat_template_kwargs.keys()):
        raise invalid(f"chat_template_kwargs: {refused[0]} cannot be set", "chat_template_kwargs")
    messages = [_as_map(message, n) for n, message in enumerate(body.messages)]
    try:
        process_message_content(messages)
    except (ValueError, TypeError, AttributeError) as error:
        raise invalid(f"messages: arguments of a tool call: {error}", "messages") from error
    arguments: dict[str, Any] = dict(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
    if tools := body.usable_tools:
        arguments["tools"] = tools
    bounded: Any = _Bounded(tokenizer, most_bytes, "messages")
    try:
        if tools and _ignores_tools(bounded, messages, arguments):
            raise invalid("tools: this model's chat template knows none", "tools")
        return prompt_tokens(bounded, messages, use_template=True, template_args=arguments)
    except SourceError as error:
        raise invalid(str(error), "messages") from error


def completion_tokens(
    tokenizer: TokenizerWrapper, body: CompletionBody, most_bytes: int | None
) -> list[int]:
    """The tokens of a text, or those given, which the model may not have. Raises ApiError."""
    prompt = body.prompt
    if isinstance(prompt, list):
        if prompt and all(isinstance(token, int) for token in prompt):
            tokens = [token for token in prompt if isinstance(token, int)]
            n_known = max(tokenizer.get_vocab().values()) + 1
            if not all(0 <= token < n_known for token in tokens):
                raise invalid(f"prompt: tokens are 0 to {n_known - 1}", "prompt")
            return tokens
        if len(prompt) != 1 or not isinstance(prompt[0], str):
            raise invalid("prompt: one prompt a request", "prompt", "unsupported_parameter")
        prompt = prompt[0]
    message = {"role": "user", "content": prompt}
    bounded: Any = _Bounded(tokenizer, most_bytes, "prompt")
    try:
        return prompt_tokens(bounded, [message], use_template=False)
    except SourceError as error:
        raise invalid(str(error), "prompt") from error


class _Bounded:
    """A tokenizer that refuses text of more than `most_bytes`: it could not fit the context.

    To split it into tokens takes time, and memory of a hundred times its size.
    """

    def __init__(self, tokenizer: TokenizerWrapper, most_bytes: int | None, param: str) -> None:
        self._tokenizer = tokenizer
        self._most_bytes = most_bytes
        self._param = param

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        """As the tokenizer's. Raises ApiError."""
        n_bytes = len(text.encode())
        if self._most_bytes is not None and n_bytes > self._most_bytes:
            most = f"{self._most_bytes:,}"
            raise too_long(f"the prompt has {n_bytes:,} bytes; {most} may fit at most", self._param)
        tokens: list[int] = self._tokenizer.encode(text, **options)
        return tokens


def _ignores_tools(
    tokenizer: TokenizerWrapper, messages: list[dict[str, Any]], arguments: dict[str, Any]
) -> bool:
    """Whether the chat template makes the same text of a conversation without its tools."""
    options = {"add_generation_prompt": True, **arguments, "tokenize": False}
    without = {name: value for name, value in options.items() if name != "tools"}
    try:
        texts = [tokenizer.apply_chat_template(messages, **o) for o in (options, without)]
    except Exception:  # templates are programs: `prompt_tokens` says what they raise
        return False
    return bool(texts[0] == texts[1])


def _as_map(message: Message, number: int) -> dict[str, Any]:
    """A message as chat templates want it. Raises ApiError for parts that are no text."""
    where = f"messages.{number}"
    if isinstance(message.content, list):
        for part in message.content:
            if part.type != "text":
                raise invalid(f"{where}: content of type {part.type!r}; only text", "messages")
            if part.text is None:
                raise invalid(f"{where}: a part without text", "messages")
    fields = message.model_dump(exclude_none=True)
    if fields["role"] == "developer":
        fields["role"] = "system"
    fields.setdefault("content", None)
    return fields

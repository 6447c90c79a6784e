"""From a request to the tokens of its prompt."""

import inspect
from typing import Any

from mlx_lm.server import process_message_content
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from moepack.formats.errors import SourceError
from moepack.tools.answering import prompt_tokens
from moepack.tools.serving.bodies import ChatBody, CompletionBody, Message
from moepack.tools.serving.errors import invalid

__all__ = ["chat_tokens", "completion_tokens"]

# What a request may not set for the template: among them is a template of its own, a program.
RESERVED = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}


def chat_tokens(tokenizer: TokenizerWrapper, body: ChatBody) -> list[int]:
    """The tokens of a conversation. Raises ApiError."""
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
    if body.tools and body.tool_choice != "none":
        arguments["tools"] = body.tools
    try:
        return prompt_tokens(tokenizer, messages, use_template=True, template_args=arguments)
    except SourceError as error:
        raise invalid(str(error), "messages") from error


def completion_tokens(tokenizer: TokenizerWrapper, body: CompletionBody) -> list[int]:
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
    try:
        return prompt_tokens(tokenizer, [message], use_template=False)
    except SourceError as error:
        raise invalid(str(error), "prompt") from error


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

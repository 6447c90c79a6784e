"""What is sent back: OpenAI's objects, from the pieces of an answer."""

from dataclasses import dataclass
from typing import Any

from moepack.tools.serving.generation import Finished
from moepack.tools.serving.parsing import Delta, merged

__all__ = ["Reply"]


@dataclass(slots=True)
class Reply:
    """The objects of one reply; `is_chat` for those of /v1/chat/completions."""

    id: str
    is_chat: bool
    model: str
    created: int
    n_prompt: int
    includes_usage: bool  # in a stream

    def chunk(self, delta: Delta, reason: str | None = None) -> dict[str, Any]:
        """A piece of a stream."""
        part = {"delta": delta} if self.is_chat else {"text": delta.get("content", "")}
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": reason}
        more = {"usage": None} if self.includes_usage else {}
        return self._as_map("chat.completion.chunk", [choice], **more)

    def last_chunks(self, finished: Finished, reason: str) -> list[dict[str, Any]]:
        """The end of a stream."""
        chunks = [self.chunk({}, reason)]
        if self.includes_usage:
            usage = self._usage(finished)
            chunks.append(self._as_map("chat.completion.chunk", [], usage=usage))
        return chunks

    def whole(self, deltas: list[Delta], finished: Finished, reason: str) -> dict[str, Any]:
        """A reply that is no stream."""
        said = merged(deltas)
        part: dict[str, Any] = {"text": said.get("content", "")}
        if self.is_chat:
            content = said.get("content", None if "tool_calls" in said else "")
            part = {"message": {"role": "assistant", **said, "content": content}}
        choice = {"index": 0, **part, "logprobs": None, "finish_reason": reason}
        return self._as_map("chat.completion", [choice], usage=self._usage(finished))

    def _as_map(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }

    def _usage(self, finished: Finished) -> dict[str, Any]:
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": finished.n_tokens,
            "total_tokens": self.n_prompt + finished.n_tokens,
            "prompt_tokens_details": {"cached_tokens": finished.n_cached},
        }

"""One prompt to one answer with a loaded pack, and what it cost."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import stream_generate
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from moepack.formats.errors import SourceError
from moepack.formats.sizes import format_size
from moepack.runtime.counters import Counters, since
from moepack.runtime.loading import Engine
from moepack.tools.prefill import watch_prefill
from moepack.tools.reporting import peak_memory

Processor = Callable[[mx.array, mx.array], mx.array]

__all__ = [
    "Answer",
    "PromptStopped",
    "Sampling",
    "answer",
    "prompt_tokens",
    "statistics",
    "statistics_line",
]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens and keep the past, by mlx-lm's names and defaults."""

    max_tokens: int = 256
    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    max_kv_size: int | None = None
    kv_bits: int | None = None

    def within(self, room: int) -> "Sampling":
        """The same, but for answers of `room` tokens at most."""
        stated = self.max_tokens
        return replace(self, max_tokens=min(stated, room) if stated > 0 else room)

    def generate_options(self, vocabulary: int, cached: list[int] | None = None) -> dict[str, Any]:
        """Keyword arguments for mlx-lm's stream_generate, for logits of `vocabulary` tokens.

        `cached` are tokens of the prompt that are in its cache already: they count as said.
        """
        # The best of at least all tokens are all tokens; mlx-lm refuses to be told so.
        top_k = self.top_k if self.top_k < vocabulary else 0
        processors = make_logits_processors(repetition_penalty=self.repetition_penalty)
        options: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "sampler": make_sampler(
                temp=self.temp, top_p=self.top_p, min_p=self.min_p, top_k=top_k
            ),
            "logits_processors": [_after(cached, p) for p in processors],
            "max_kv_size": self.max_kv_size,
        }
        if self.kv_bits is not None:
            options |= {"kv_bits": self.kv_bits, "quantized_kv_start": 0}
        return options


def _after(cached: list[int] | None, processor: Processor) -> Processor:
    """A logits processor to which `cached` come before the tokens it is given."""
    if not cached:
        return processor
    before = mx.array(cached)
    return lambda tokens, logits: processor(mx.concatenate([before, tokens]), logits)


class PromptStopped(Exception):
    """Stopped before an answer began. A cache holds `n_read` tokens, some of its layers more."""

    def __init__(self, n_read: int) -> None:
        super().__init__(n_read)
        self.n_read = n_read


@dataclass(frozen=True, slots=True)
class Answer:
    """What mlx-lm reported when the answer ended. `tokens` are those said, the last one too."""

    text: str
    tokens: list[int]
    finish_reason: str
    n_prompt_tokens: int
    n_tokens: int
    prompt_tps: float
    generation_tps: float


def prompt_tokens(
    tokenizer: TokenizerWrapper,
    messages: list[dict[str, str]],
    *,
    use_template: bool,
    template_args: dict[str, Any] | None = None,
) -> list[int]:
    """The tokens of a conversation; without a template, of its last message alone.

    Raises SourceError when the template refuses the conversation or nothing is left to send.
    """
    if use_template:
        options = {"add_generation_prompt": True, **(template_args or {}), "tokenize": False}
        try:
            text = tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # templates are programs: they raise anything
            reason = " ".join(str(error).split())
            raise SourceError(f"the chat template refused the conversation: {reason}") from error
        if not isinstance(text, str):
            raise SourceError("--chat-template-args: the chat template gave no text with these")
    else:
        text = messages[-1]["content"]
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=not use_template)
    if not tokens and tokenizer.bos_token_id is not None:
        tokens = [tokenizer.bos_token_id]
    if not tokens and text:
        raise SourceError("the model's tokenizer has no tokens for this prompt")
    if not tokens:
        raise SourceError("the prompt is empty and the model has no token that begins a text")
    return tokens


def answer(
    engine: Engine,
    tokenizer: TokenizerWrapper,
    tokens: list[int],
    sampling: Sampling,
    show: Callable[[str], object],
    *,
    n_cached: int = 0,
    is_stopped: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Answer:
    """Generate; `show` gets each piece of text as it comes. `options` go to stream_generate.

    The prompt cache among them, if any, holds the first `n_cached` of `tokens`. `is_stopped` ends
    the answer after the token in hand; while the prompt is read, it raises PromptStopped.
    """
    pieces: list[str] = []
    said: list[int] = []
    last = None
    n_read = n_cached
    callers = options.pop("prompt_progress_callback", None)

    def check() -> None:
        if is_stopped():
            raise PromptStopped(n_read)

    with engine.caches_only(), watch_prefill(engine, len(tokens) - n_cached, check) as watch:

        def on_prompt(n_done: int, n_all: int) -> None:
            nonlocal n_read
            n_read = n_cached + n_done
            if callers is not None:
                callers(n_done, n_all)
            watch(n_done, n_all)

        responses = stream_generate(
            engine.model,
            tokenizer,
            mx.array(tokens[n_cached:]),
            prefill_step_size=engine.plan.prefill_step,
            prompt_progress_callback=on_prompt,
            **sampling.generate_options(engine.vocabulary, tokens[:n_cached]),
            **options,
        )
        with closing(responses):
            for last in responses:
                said.append(last.token)
                if last.text:
                    show(last.text)
                    pieces.append(last.text)
                if is_stopped():
                    break
    assert last is not None  # stream_generate ends with a response of its own
    return Answer(
        text="".join(pieces),
        tokens=said,
        finish_reason=last.finish_reason or "interrupted",
        n_prompt_tokens=last.prompt_tokens,
        n_tokens=last.generation_tokens,
        prompt_tps=last.prompt_tps,
        generation_tps=last.generation_tps,
    )


def statistics(
    engine: Engine,
    result: Answer,
    load_s: float,
    before: tuple[Counters, Counters] | None = None,
) -> dict[str, Any]:
    """The object that `run --json` prints; experts as counted since the counters were `before`."""
    prefill, decode = engine.counters()
    if before is not None:
        prefill, decode = since(prefill, before[0]), since(decode, before[1])
    both = [prefill, decode]
    hits, misses = sum(c.hits for c in both), sum(c.misses for c in both)
    return {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.n_prompt_tokens,
        "generation_tokens": result.n_tokens,
        "prompt_tps": result.prompt_tps,
        "generation_tps": result.generation_tps,
        "load_s": load_s,
        "peak_memory_bytes": peak_memory(),
        "planned_memory_bytes": engine.plan.total,
        "mode": "streamed" if engine.layers else "resident",
        "lossy_top_k": engine.lossy_top_k,
        "wired_bytes": engine.wired,
        "experts": {
            "reads": "past the page cache" if engine.reads_past_page_cache else "page cache",
            "read_workers": engine.read_workers,
            "slots_per_layer": max(engine.plan.slots_per_layer),
            "cache_bytes": engine.plan.slots,
            "pinned": sum(len(layer.pinned) for layer in engine.layers),
            "hits": hits,
            "misses": misses,
            "hit_rate": hits / (hits + misses) if hits + misses else None,
            "bytes_read": sum(c.bytes_read for c in both),
            "read_s": sum(c.read_s for c in both),
            "evictions": sum(c.evictions for c in both),
            "prefill": prefill.as_map(),
            "decode": decode.as_map(),
        },
    }


def statistics_line(figures: dict[str, Any]) -> str:
    """The same for a person, in one line."""
    experts = figures["experts"]
    parts = [
        f"prompt {figures['prompt_tokens']} tokens, {figures['prompt_tps']:.1f} tokens/s",
        f"answer {figures['generation_tokens']} tokens, {figures['generation_tps']:.1f} tokens/s",
    ]
    if figures["mode"] == "streamed":
        parts.append(
            f"{experts['slots_per_layer']} experts a layer in memory, "
            f"hit rate {100 * (experts['hit_rate'] or 0):.1f} %, "
            f"{format_size(experts['bytes_read'])} read ({experts['reads']})"
        )
        if experts["pinned"]:
            parts.append(f"{experts['pinned']} experts pinned")
    else:
        parts.append("all experts in memory")
    if figures["wired_bytes"]:
        parts.append(f"{format_size(figures['wired_bytes'])} wired")
    parts.append(
        f"peak memory {format_size(figures['peak_memory_bytes'])} "
        f"(planned {format_size(figures['planned_memory_bytes'])})"
    )
    return "; ".join(parts)


def as_json(figures: dict[str, Any]) -> str:
    """One line of JSON."""
    return json.dumps(figures, ensure_ascii=False)

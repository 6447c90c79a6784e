"""While a prompt is read: how far it is, and whether it is still wanted."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from moepack.runtime.loading import Engine
from moepack.runtime.streamed import Record
from moepack.tools.reporting import prompt_progress

__all__ = ["OnPrompt", "watch_prefill"]

OnPrompt = Callable[[int, int], object]  # mlx-lm's prompt_progress_callback: tokens done, of all


@contextmanager
def watch_prefill(engine: Engine, n_tokens: int, check: Callable[[], object]) -> Iterator[OnPrompt]:
    """Give what mlx-lm is to tell of a prompt of `n_tokens`; show a bar meanwhile.

    `check` is called before each streamed layer of a chunk and after each chunk. What it raises
    ends the reading; between chunks, every layer's cache holds the same tokens.
    """
    before = [layer.record for layer in engine.layers]
    with prompt_progress(n_tokens) as advance_to:
        n_done = 0.0

        def hook(record: Record | None) -> Record:
            def called(
                experts: Sequence[int], uses: Sequence[int], n_chunk: int, is_decode: bool
            ) -> None:
                nonlocal n_done
                if not is_decode:
                    check()
                    n_done += n_chunk / len(engine.layers)
                    advance_to(n_done)
                if record is not None:
                    record(experts, uses, n_chunk, is_decode)

            return called

        def on_prompt(n_read: int, n_all: int) -> None:
            nonlocal n_done
            n_done = n_read
            advance_to(n_read)
            if n_read < n_all:
                check()

        for layer, record in zip(engine.layers, before, strict=True):
            layer.record = hook(record)
        try:
            yield on_prompt
        finally:
            for layer, record in zip(engine.layers, before, strict=True):
                layer.record = record

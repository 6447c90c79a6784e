"""`--prompt-cache-file`: the KV cache of a prompt, kept in mlx-lm's own file form.

The file remembers the prompt's tokens and the pack. Another prompt reuses the part that both
begin with, where the model's cache can be cut back to it.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.utils import common_prefix_len

from moepack.formats.errors import SourceError
from moepack.runtime.loading import Engine
from moepack.tools.answering import Sampling

__all__ = ["open_prompt_cache"]


def open_prompt_cache(
    path: Path, engine: Engine, tokens: list[int], sampling: Sampling
) -> tuple[list[Any], int, str]:
    """(cache, how many of `tokens` it holds, a note): read from `path`, or made and saved there.

    At least one token is left to run. Raises SourceError for a file of another pack or form.
    """
    pack_id = engine.pack.manifest.pack_id
    if not path.exists():
        cache = _process(engine, tokens[:-1], sampling)
        save_prompt_cache(str(path), cache, {"pack_id": pack_id, "tokens": json.dumps(tokens[:-1])})
        return cache, len(tokens) - 1, f"saved {len(tokens) - 1} tokens to {path}"
    try:
        cache, metadata = load_prompt_cache(str(path), return_metadata=True)
        saved: list[int] = json.loads(metadata["tokens"])
        owner = metadata["pack_id"]
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        raise SourceError(f"{path}: not a prompt cache of moepack ({error})") from error
    if owner != pack_id:
        raise SourceError(f"{path}: made with another pack; remove it or name another file")
    n_shared = min(common_prefix_len(saved, tokens), len(tokens) - 1)
    if n_shared == len(saved):
        return cache, n_shared, f"reused {n_shared} tokens from {path}"
    if not can_trim_prompt_cache(cache):
        cache = make_prompt_cache(engine.model, sampling.max_kv_size)
        return cache, 0, f"{path} does not begin this prompt and cannot be cut; not used"
    trim_prompt_cache(cache, len(saved) - n_shared)
    return cache, n_shared, f"reused {n_shared} of {len(saved)} tokens from {path}"


def _process(engine: Engine, tokens: list[int], sampling: Sampling) -> list[Any]:
    """The model's cache after `tokens`."""
    cache: list[Any] = make_prompt_cache(engine.model, sampling.max_kv_size)
    if tokens:
        options = sampling.generate_options() | {"max_tokens": 0, "prompt_cache": cache}
        for _ in generate_step(mx.array(tokens), engine.model, **options):
            pass
    return cache

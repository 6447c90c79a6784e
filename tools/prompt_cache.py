"""`--prompt-cache-file`: the KV cache of a prompt, kept in mlx-lm's own file form.

The file remembers the prompt's tokens and what else its content depends on. Another prompt reuses
the part that both begin with, where the model's cache can be cut back to it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import (
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.utils import common_prefix_len
from safetensors import SafetensorError, safe_open

from moepack.formats.digests import digest_file
from moepack.formats.errors import SourceError
from moepack.formats.whole import whole_file
from moepack.runtime.loading import Engine
from moepack.tools.answering import Sampling

__all__ = ["open_prompt_cache"]


def open_prompt_cache(
    path: Path,
    engine: Engine,
    tokens: list[int],
    sampling: Sampling,
    adapter_path: Path | None,
    notify: Callable[[str], object],
) -> tuple[dict[str, Any], int]:
    """(options for stream_generate, how many of `tokens` the cache that they hold has already).

    Where there is no file, the options make generation save one when the prompt has been read: so
    the answer is the one without a file. At least one token is left to run. `notify` is told what
    was saved or reused, and of a save that failed, which leaves no file. Raises SourceError for a
    file of another pack, adapter or kind of cache.
    """
    binding = _binding(engine, sampling, adapter_path)
    if not path.exists():
        cache = make_prompt_cache(engine.model, sampling.max_kv_size)

        def save_when_read(n_done: int, n_tokens: int) -> None:
            if 0 < n_done == n_tokens - 1:
                notify(_save(path, cache, tokens[:n_done], binding))

        if len(tokens) == 1:
            notify(f"nothing to save to {path}: all but the prompt's last token is kept")
        return {"prompt_cache": cache, "prompt_progress_callback": save_when_read}, 0
    try:
        cache, metadata = load_prompt_cache(str(path), return_metadata=True)
        saved = json.loads(metadata["tokens"])
        if not isinstance(saved, list) or not all(isinstance(token, int) for token in saved):
            raise ValueError("its tokens are no numbers")
        found = {key: metadata[key] for key in binding}
    except Exception as error:  # mlx-lm trusts the file: any of its classes may fail on it
        raise SourceError(f"{path}: not a prompt cache of moepack ({error})") from error
    for key, value in binding.items():
        if found[key] != value:
            stated = "" if key == "pack" else f" ({found[key]}, now {value})"
            raise SourceError(
                f"{path}: made with another {key}{stated}; remove it or name another file"
            )
    n_shared = min(common_prefix_len(saved, tokens), len(tokens) - 1)
    if n_shared == len(saved):
        notify(f"reused {n_shared} tokens from {path}")
    elif can_trim_prompt_cache(cache):
        trim_prompt_cache(cache, len(saved) - n_shared)
        notify(f"reused {n_shared} of {len(saved)} tokens from {path}")
    else:
        notify(f"{path} does not begin this prompt and cannot be cut; not used")
        return {}, 0
    return {"prompt_cache": cache}, n_shared


def _binding(engine: Engine, sampling: Sampling, adapter_path: Path | None) -> dict[str, str]:
    """What the content of a cache depends on besides the tokens, by the name of the choice."""
    adapter = "none"
    if adapter_path is not None:
        names = ("adapter_config.json", "adapters.safetensors")
        adapter = "".join(digest_file(adapter_path / name).hex() for name in names)
    return {
        "pack": engine.pack.manifest.pack_id,
        "--adapter-path": adapter,
        "--max-kv-size": str(sampling.max_kv_size),
        "--kv-bits": str(sampling.kv_bits),
        "--lossy-top-k": str(engine.lossy_top_k),
    }


def _save(path: Path, cache: list[Any], tokens: list[int], binding: dict[str, str]) -> str:
    """Write the file, whole or not at all; returns the note about it."""
    try:
        with whole_file(path) as unfinished:
            save_prompt_cache(str(unfinished), cache, {**binding, "tokens": json.dumps(tokens)})
            with safe_open(unfinished, framework="numpy"):
                pass  # MLX's writer does not notice a full disk
    except (RuntimeError, OSError, SafetensorError) as error:
        return f"warning: {path} was not saved ({' '.join(str(error).split())})"
    return f"saved {len(tokens)} tokens to {path}"

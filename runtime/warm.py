"""Warm start: the experts that the last run of a pack used most are read before the first token.

The scores of each layer's policy are kept in the user's cache folder, by pack id, never in the
pack. They decide what is in memory at the start, not what the model says.
"""

import json
import math
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from moepack.formats.errors import FormatError
from moepack.runtime.loading import Engine
from moepack.runtime.policy import DecayedFrequency
from moepack.runtime.streamed import StreamedExperts
from moepack.runtime.user_cache import cache_folder, write_whole

__all__ = ["SHIPPED_NAME", "profile_path", "save_profile", "warm_up"]

MAX_PROFILE_NBYTES = 64 * 2**20  # a thousand layers of two thousand experts take 20 MB
SHIPPED_NAME = "hot_experts.json"  # a profile in a pack, of whoever made that
LEAST_SCORE = 1e-6  # of an expert last used some 240 tokens ago; less is not worth a read


def profile_path(engine: Engine) -> Path | None:
    """The file of the engine's pack; None when the user has no home."""
    folder = cache_folder(sys.platform, os.environ)
    return folder and folder / "experts" / f"{engine.pack.manifest.pack_id}.json"


def save_profile(engine: Engine, path: Path) -> None:
    """Keep the scores of every streamed layer. Raises OSError."""
    layers = {}
    for layer in engine.layers:
        if isinstance(layer.policy, DecayedFrequency):
            scores = layer.policy.relative_scores()
            layers[str(layer.number)] = [round(score, 6) for score in scores]
    write_whole(path, json.dumps({"scores": layers}))


def warm_up(engine: Engine, path: Path) -> list[str]:
    """Take over scores kept at `path` and read the experts they favour into free slots.

    Without scores there, those that the pack ships are taken. None are read where neither are, or
    where they do not fit. Returns a line for each
    record that is damaged or cannot be read: its expert is left on disk, where a router that picks
    it finds the same, and then that is an error. The engine's `pins` of them are pinned.
    """
    kept = _read_profile(path) or _read_profile(engine.pack.path / SHIPPED_NAME)
    problems: list[str] = []
    for layer in engine.layers:
        scores = kept.get(str(layer.number), [])
        if len(scores) != layer.n_experts or not isinstance(layer.policy, DecayedFrequency):
            continue
        layer.policy.scores = scores
        worth = [e for e in range(layer.n_experts) if scores[e] >= LEAST_SCORE]
        best = sorted(worth, key=scores.__getitem__, reverse=True)[: layer.n_slots]
        problems += _preload(layer, best[::-1])  # the best one last: the most recently used
        residents = set(layer.residents)
        layer.pin([e for e in best if e in residents][: engine.pins])
    return problems


def _preload(layer: StreamedExperts, experts: Sequence[int]) -> list[str]:
    """Read all at once, or, if that fails, each alone; returns what is wrong with some."""
    try:
        layer.preload(experts)
    except FormatError:
        problems = []
        for expert in experts:
            try:
                layer.preload([expert])
            except FormatError as error:
                problems.append(str(error))
        return problems
    return []


def _read_profile(path: Path) -> dict[str, list[float]]:
    """Scores by layer; nothing of a file that is gone, damaged, absurd or not a regular one."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_PROFILE_NBYTES:
            return {}
        layers = json.loads(path.read_text(encoding="utf-8"))["scores"].items()
        by_layer = {number: [float(score) for score in scores] for number, scores in layers}
        return {
            number: scores
            for number, scores in by_layer.items()
            if all(0 <= score < math.inf for score in scores)
        }
    except (
        OSError,
        ValueError,
        RecursionError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,  # an integer of hundreds of digits
    ):
        return {}

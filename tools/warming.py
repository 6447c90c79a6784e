"""The profile of a warm start, for the commands that answer: where it is, and keeping it."""

from pathlib import Path

from moepack.runtime.loading import Engine
from moepack.runtime.warm import profile_path, save_profile
from moepack.tools.reporting import note

__all__ = ["keep", "profile_of"]


def profile_of(engine: Engine, is_on: bool) -> Path | None:
    """Where the engine's profile is kept; None where it has no use for one, or is not to."""
    return profile_path(engine) if is_on and engine.layers else None


def keep(engine: Engine, profile: Path) -> None:
    """Keep which experts this run used most; that it could not be kept is a warning."""
    try:
        save_profile(engine, profile)
    except OSError as error:
        note(f"warning: {profile} was not saved ({error.strerror})")

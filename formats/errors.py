"""The errors of moepack: one class per thing a user can do about it.

Text: where: what is wrong (found, wanted); what to do. The command prints it as one line.
"""

__all__ = ["BudgetError", "FormatError", "MoepackError", "SourceError"]


class MoepackError(Exception):
    """Base of every error that moepack raises on purpose."""


class FormatError(MoepackError, ValueError):
    """A pack, or a file of one, is not what format 1.0 says."""


class SourceError(MoepackError, OSError):
    """A checkpoint, or a path given by the user, cannot be used."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class BudgetError(MoepackError):
    """A memory or cache size given by the user is below what the model needs."""

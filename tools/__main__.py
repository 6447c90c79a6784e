"""`python -m moepack.tools`: the same as `moepack`."""

from moepack.tools.cli import entry_point

entry_point()

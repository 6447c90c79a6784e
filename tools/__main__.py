"""`python -m moepack.tools`: the same as `moepack`."""

from moepack.tools.startup import entry_point

entry_point()

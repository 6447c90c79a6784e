"""The `moepack` command, one module a subcommand; benchmarks; the demo."""

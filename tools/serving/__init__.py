"""The server of `moepack serve`: an OpenAI-compatible API and a live page over packs."""

"""The server of `moepack serve`: an OpenAI-compatible API over one loaded pack."""

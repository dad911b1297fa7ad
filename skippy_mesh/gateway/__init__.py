"""The HTTP side: the OpenAI API in front of an engine."""

"""Failures that these tools report without a traceback."""


class ToolError(Exception):
    """A failure whose message says what is wrong and what to do about it."""

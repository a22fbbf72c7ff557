"""The programs that run models: how merging is attached in each, and taken off again."""

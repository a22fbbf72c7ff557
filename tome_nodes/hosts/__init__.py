"""The programs that run the models: how merging is attached to each, and taken off again."""

"""One sampling run in any host: its steps, what was done in them, and why not more was."""

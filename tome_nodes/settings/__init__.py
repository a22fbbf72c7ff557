"""Options, presets, and the frozen settings that they become."""

"""Finding the settings that fulfil a wish, by trying them on the user's own model and device."""

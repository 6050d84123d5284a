"""What the engine raises."""


class UnsupportedModel(ValueError):
    """The model, or its loss, does something that the engine cannot do right; nothing was computed or released."""

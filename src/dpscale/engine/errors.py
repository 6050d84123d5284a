"""What the engine raises."""


class UnsupportedModel(ValueError):
    """The model, or its loss, does something that the engine cannot do right; nothing was computed or released."""


class PassedBy(UnsupportedModel):
    """A parameter reached the losses where no operation of it was seen."""


SECOND = (
    "The loss takes a gradient of a gradient (create_graph=True, as in a gradient penalty, or torch.func.grad). What "
    "that owes to the parameters cannot be seen, so their per-sample gradients are unknown. Leave that term out, or "
    "take its gradient by torch.autograd.grad without create_graph and use it as a constant."
)

"""Operations that torch runs in one piece but that consist of linear layers: recurrent networks and their cells.

Each is written here with `linear` and pointwise steps, so that the rule of `linear` meets its weights. The numbers are
torch's own up to rounding, and dropout is drawn in the same order. The products with the input are one `linear` over
all time steps; those with the hidden state are one per step, because each needs the step before.

Shape suffixes: T time steps, B samples, I inputs, H hidden units, G = gates · H.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, ...]
"""Hidden state of one layer and direction: (h,), or (h, c) for an LSTM."""

Step = Callable[[Tensor, Tensor, State], State]
"""From the input's and the hidden state's share of the gates, and the state, to the next state."""


def _lstm(x_BG: Tensor, h_BG: Tensor, state: State) -> State:
    i, f, g, o = (x_BG + h_BG).chunk(4, 1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(x_BG: Tensor, h_BG: Tensor, state: State) -> State:
    x_r, x_z, x_n = x_BG.chunk(3, 1)
    h_r, h_z, h_n = h_BG.chunk(3, 1)
    n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
    return (n + torch.sigmoid(x_z + h_z) * (state[0] - n),)


def _network(step: Step) -> Callable[..., Any]:
    """A stack of recurrent layers, called as `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu` are."""

    def run(
        input: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        x = input.transpose(0, 1) if batch_first else input
        directions = 2 if bidirectional else 1
        given: State = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        weights = 2 + 2 * has_biases
        weights += len(params) > weights * num_layers * directions  # a projection of the hidden state
        finals: list[State] = []
        for layer in range(num_layers):
            outs = []
            for backwards in range(directions):
                k = layer * directions + backwards
                own = params[k * weights : (k + 1) * weights]
                # A default state knows nothing of the input. As its rows are the samples', let it be seen to be theirs.
                state = tuple(t[k].expand_as(x.new_empty(t.shape[1:])) for t in given)
                out, state = _layer(step, x, state, own, has_biases, bool(backwards))
                outs.append(out)
                finals.append(state)
            x = torch.cat(outs, 2) if bidirectional else outs[0]
            if dropout and train and layer < num_layers - 1:
                x = torch.dropout(x, dropout, True)
        last = [torch.stack(parts) for parts in zip(*finals, strict=True)]
        return (x.transpose(0, 1) if batch_first else x, *last)

    return run


def _layer(
    step: Step, x_TBI: Tensor, state: State, params: Sequence[Tensor], biases: bool, backwards: bool
) -> tuple[Tensor, State]:
    """One direction of one layer: the hidden states of all steps, and the last state."""
    w_ih, w_hh = params[:2]
    b_ih, b_hh = params[2:4] if biases else (None, None)
    project = params[-1] if len(params) % 2 else None
    gates_TBG = F.linear(x_TBI, w_ih, b_ih)
    outs = []
    for gates_BG in reversed(gates_TBG.unbind(0)) if backwards else gates_TBG.unbind(0):
        h, *rest = step(gates_BG, F.linear(state[0], w_hh, b_hh), state)
        state = (h if project is None else F.linear(h, project), *rest)
        outs.append(state[0])
    return torch.stack(outs[::-1] if backwards else outs), state


def _cell(step: Step) -> Callable[..., Any]:
    """One step, called as `torch.lstm_cell` and its kin are."""

    def run(
        input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Any:
        given: State = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        state = tuple(t.expand_as(input.new_empty(t.shape)) for t in given)
        state = step(F.linear(input, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
        return state[0] if isinstance(hx, Tensor) else state

    return run


_STEPS: dict[str, Step] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda x_BG, h_BG, state: (torch.tanh(x_BG + h_BG),),
    "rnn_relu": lambda x_BG, h_BG, state: (torch.relu(x_BG + h_BG),),
}

COMPOSITES: dict[Callable[..., Any], Callable[..., Any]] = {
    **{getattr(torch, name): _network(step) for name, step in _STEPS.items()},
    **{getattr(torch, f"{name}_cell"): _cell(step) for name, step in _STEPS.items()},
}
"""What to run in the place of an operation whose parameters are to be met."""


def packed(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a recurrent network is given a `PackedSequence`: rows of several samples, sorted by length."""
    return func.__name__ in _STEPS and len(args) > 3 and not isinstance(args[3], bool)

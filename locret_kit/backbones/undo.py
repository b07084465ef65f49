"""Changes of a model that can be taken back, whatever interrupts them."""

from collections.abc import Callable
from functools import partial, wraps

from torch import Tensor, nn

Forward = Callable[..., Tensor]
"""A module's own."""


class Undo:
    """Steps that restore a model. Each is added *before* the change that it takes back, and may run more than once: so an
    interrupt (Ctrl-C) between any two instructions loses none."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        """Whether anything is left to restore."""
        return bool(self._steps)

    def add(self, step: Callable[[], None]) -> None:
        """Run ``step`` before the steps that are here already."""
        self._steps.append(step)

    def run(self) -> None:
        """Run every step, the newest first. An interrupted step runs again. Exceptions are raised after the last
        step."""
        raised: BaseException | None = None
        while self._steps:
            try:
                self._steps[-1]()
                self._steps.pop()
            except Exception as error:  # a step that fails would fail again
                self._steps.pop()
                raised = raised or error
            except BaseException as error:
                raised = raised or error
        if raised is not None:
            raise raised


def replace_forward(undo: Undo, module: nn.Module, forward: Callable[..., object]) -> None:
    """Let ``module`` run ``forward(its own forward, *args, **kwargs)`` until ``undo``."""
    shadowed = module.__dict__.get("forward")  # accelerate puts its own there

    def restore() -> None:
        if shadowed is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = shadowed

    undo.add(restore)
    module.forward = wraps(module.forward)(partial(forward, module.forward))


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module's forward is its class's own. ``replace_forward`` may wrap it, but the class's method must be
    defined in the class, not patched by a program."""
    forward, own = module.__dict__.get("forward"), type(module).forward
    home = next(kind for kind in type(module).__mro__ if "forward" in kind.__dict__)
    while getattr(getattr(forward, "func", None), "__module__", "").startswith(__package__):
        forward = forward.__wrapped__  # type: ignore[union-attr]
    return own.__module__ == home.__module__ and (forward is None or getattr(forward, "__func__", None) is own)


def run_eagerly(undo: Undo, model: nn.Module) -> None:
    """Let modules run as they were before ``torch.compile`` until ``undo``: a graph would end in each layer's attention."""
    for module in model.modules():
        forward, call = module.__dict__.get("forward"), module._compiled_call_impl
        if (own := getattr(forward, "_torchdynamo_orig_callable", None)) is not None:
            undo.add(partial(setattr, module, "forward", forward))
            module.forward = own
        if call is not None:
            undo.add(partial(setattr, module, "_compiled_call_impl", call))
            module._compiled_call_impl = None

"""Registers ops with torch.library, and calls them without its dispatcher where nothing looks on.

torch's dispatcher of Python ops takes 0.06 to 0.07 ms of a slow CPU for each call with a gradient, and again
for its backward; a GPU that waits for its host needs less for a whole norm. So an op that runs eagerly is an
autograd function around the same body, with the same formula of its gradient. The registered op is called
where somebody must see it as one: under torch.compile, and under a dispatch mode (fake tensors, tracing,
counters of FLOP).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

Body = Callable[..., Any]
Formula = Callable[..., Any]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


class Op:
    """A registered op of this package. Called, it computes; results and gradients are those of the body."""

    def __init__(self, name: str, body: Body, results: Body) -> None:
        self._name = name
        self._body = body
        self._definition = torch.library.custom_op(name, body, mutates_args=())
        self._definition.register_fake(results)
        namespace, short_name = name.split("::")
        self._registered = getattr(getattr(torch.ops, namespace), short_name).default
        self._function: type[torch.autograd.Function] | None = None

    def __call__(self, *args: Any) -> Any:
        """Compute the op of its arguments, in the order of the body's, none left out."""
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():  # pyright: ignore[reportPrivateImportUsage]
            return self._registered(*args)
        if not torch.is_grad_enabled():
            return self._body(*args)
        # An op without a formula says so in its backward, if it is ever asked for a gradient.
        return self._function.apply(*args) if self._function else self._registered(*args)

    def gradient(self, save: Formula = _save_inputs) -> Callable[[Formula], Formula]:
        """Return a decorator that registers the gradient, in the form of `torch.library.register_autograd`.

        `save(ctx, inputs, output)` keeps what it needs: all inputs, unless said otherwise.
        """

        def registered(backward: Formula) -> Formula:
            self._definition.register_autograd(backward, setup_context=save)

            def forward(ctx: Any, *args: Any) -> Any:
                # With a `setup_context` of the class torch would bind arguments to a signature each time.
                output = self._body(*args)
                save(ctx, args, output)
                return output

            formula = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
            # The class's name is what a profiler shows.
            self._function = type(self._name.split("::")[1], (torch.autograd.Function,), formula)
            return backward

        return registered


def register(name: str, results: str | Body) -> Callable[[Body], Op]:
    """Return a decorator that makes an `Op` of a function that changes no argument; all are annotated.

    `results` makes empty tensors like its results, of the same arguments; or it names the arguments, apart by
    a space, that these are like in shape, dtype and device.
    """

    def registered(body: Body) -> Op:
        if not isinstance(results, str):
            return Op(name, body, results)
        names = list(inspect.signature(body).parameters)
        places = [names.index(like) for like in results.split()]

        def empty(*args: Any) -> Any:
            made = [args[place].new_empty(args[place].shape) for place in places]
            return tuple(made) if len(made) > 1 else made[0]

        return Op(name, body, empty)

    return registered

"""The routers of a `transformers` mixture of experts: their choices are recorded, or given ones take their place.

A router is a module that returns its logits, the weights of the chosen experts and their ids. It chooses by one
`topk` over all of its experts, in every family of transformers 5; so `Forced` answers that call with given ids,
and the router computes the weights from its own logits as always. That is what "Stabilizing MoE Reinforcement
Learning by Aligning Training and Inference Routers" (Ma et al. 2025, arXiv:2510.11370) calls rollout routing replay,
R3.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from codec.routes import RouteShape, encode_routes
from node.engines.rows import UNREADABLE, read_all

__all__ = ["Recorder", "RouteLog", "forced", "recordable", "route_shape", "routers"]

_TOPK = (torch.topk, torch.Tensor.topk)


def routers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The routers of `model`, in the order of its layers; empty for a dense model."""
    return [module for module in model.modules() if type(module).__name__.endswith("Router") and _numbers(module)]


def _numbers(module: torch.nn.Module) -> tuple[int, int] | None:
    """(experts chosen, experts) of a router; None for another module."""
    chosen = getattr(module, "top_k", None)
    experts = getattr(module, "num_experts", None) or getattr(module, "n_routed_experts", None)
    return (chosen, experts) if isinstance(chosen, int) and isinstance(experts, int) else None


def route_shape(model: torch.nn.Module) -> RouteShape | None:
    """The shape of the model's routes; None if it has no routers, or routers that differ or are beyond the coder."""
    found = routers(model)
    numbers = {_numbers(router) for router in found}
    if len(numbers) != 1 or (one := numbers.pop()) is None:
        return None
    shape = RouteShape(len(found), *one)
    return shape if shape.possible else None


class Recorder:
    """Records the choices of a model's routers in the `with` blocks of `recording`."""

    def __init__(self, model: torch.nn.Module, shape: RouteShape) -> None:
        """`shape`: that of `route_shape(model)`."""
        self._routers, self._shape = routers(model), shape

    @contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """One forward of the model goes into the block; the list then has its ids, one tensor a layer: (rows, k)."""
        found: list[torch.Tensor] = []

        def keep(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            found.append(_ids_of(output, self._shape))

        handles = [router.register_forward_hook(keep) for router in self._routers]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    def routes(self, found: list[torch.Tensor], texts: int) -> NDArray[np.uint16]:
        """What `recording` found, for a batch of `texts` equally long texts: (texts, positions, layers, k).

        Raises `ValueError` where a layer was not called exactly once.
        """
        if len(found) != self._shape.layers:
            raise ValueError(f"routes: {len(found)} routers were called, and the model has {self._shape.layers}")
        ids = torch.stack(found, 1)  # rows are (text, position)
        return ids.reshape(texts, -1, *ids.shape[1:]).to("cpu", torch.int32).numpy().astype(np.uint16)


def _ids_of(output: Any, shape: RouteShape) -> torch.Tensor:
    """The chosen ids in a router's output: its only tensor of integers with k columns. Raises `ValueError`."""
    for part in output if isinstance(output, tuple) else (output,):
        if isinstance(part, torch.Tensor) and not part.is_floating_point() and part.shape[-1] == shape.chosen:
            return part.reshape(-1, shape.chosen)
    raise ValueError("routes: a router of this model does not return which experts it chose")


@torch.inference_mode()
def recordable(model: torch.nn.Module) -> RouteShape | None:
    """The shape of the model's routes, if a forward shows that they can be recorded; otherwise None."""
    if (shape := route_shape(model)) is None:
        return None
    recorder, ids = Recorder(model, shape), torch.zeros((1, 2), dtype=torch.int64)
    try:
        with recorder.recording() as found:
            read_all(model, ids.to(next(model.parameters()).device))  # type: ignore[arg-type]
        recorder.routes(found, 1)
    except UNREADABLE:
        return None
    return shape


class RouteLog:
    """The routes of a batch of equally long prompts and of the tokens that are drawn after them."""

    def __init__(self, model: torch.nn.Module, shape: RouteShape, prompts: int) -> None:
        """`prompts`: how many there are; a batch may have rows beyond them."""
        self._recorder, self._shape, self._prompts = Recorder(model, shape), shape, prompts
        self._first: NDArray[np.uint16] | None = None
        """Of the prompts' positions but the last."""
        self._drawn: list[NDArray[np.uint16]] = []
        """Of the position that each token was drawn from: (prompts, layers, k)."""

    def read(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The logits of `forward`, which reads the model once. At first it reads the whole prompts."""
        with self._recorder.recording() as found:
            logits = forward()
        ids = self._recorder.routes(found, len(logits))[: self._prompts]
        if self._first is None:
            self._first = ids[:, :-1]
        self._drawn.append(ids[:, -1])
        return logits

    def completion(self, row: int, length: int) -> bytes:
        """`Completion.routes` of a row whose completion has `length` tokens."""
        return encode_routes(np.stack([ids[row] for ids in self._drawn[:length]]), self._shape.experts)

    def prompt(self, row: int) -> bytes:
        """`Completion.prompt_routes` of a row."""
        assert self._first is not None
        return encode_routes(self._first[row], self._shape.experts)


class _ForcedTopk(TorchFunctionMode):
    """Answers the `topk` that chooses experts with `ids`: int64, (rows, k); a row of -1 chooses by itself."""

    def __init__(self, ids: torch.Tensor, experts: int) -> None:
        super().__init__()
        self._ids, self._experts, self.calls = ids, experts, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOPK or found.indices.shape != self._ids.shape or args[0].shape[-1] != self._experts:
            return found
        self.calls += 1
        own = self._ids[:, :1] < 0
        ids = torch.where(own, found.indices, self._ids)
        # In the order of the weights, as `topk` gives them: sums over experts then round as they do without replay.
        order = args[0].gather(-1, ids).argsort(dim=-1, descending=True, stable=True)
        ids = ids.gather(-1, order)
        return torch.return_types.topk((args[0].gather(-1, ids), ids))  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def forced(model: torch.nn.Module, ids: torch.Tensor, shape: RouteShape) -> Iterator[None]:
    """In this block every forward of `model` takes these experts, with weights from its own routers.

    `ids`: int64, (texts, positions, layers, k), of the batch that is read; -1 where the router chooses by itself. A
    backward pass that computes a layer anew must be in the block, too. Raises `ValueError` for a batch of another size,
    and for a model whose routers do not choose by `topk`.
    """
    flat = ids.reshape(-1, *ids.shape[2:]).to(next(model.parameters()).device)
    originals: list[tuple[Any, Any]] = []
    try:
        for layer, router in enumerate(routers(model)):
            original = router.forward
            originals.append((router, original))
            router.forward = _taking(original, flat[:, layer], shape.experts)
        yield
    finally:
        for router, original in originals:
            router.forward = original


def _taking(original: Any, ids: torch.Tensor, experts: int) -> Any:
    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = hidden.numel() // hidden.shape[-1]
        if rows != len(ids):
            raise ValueError(f"routes: of {len(ids)} positions, and the batch has {rows}")
        with _ForcedTopk(ids, experts) as mode:
            output = original(hidden, *args, **kwargs)
        if not mode.calls:
            raise ValueError("routes: this model's routers do not choose by topk, so no route can be replayed")
        return output

    return forward

"""A rank's live weights: mapped, staged, written, read back and loaded again."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from .boxes import Box
from .codes import CodePacking
from .messages import Part, Tensor
from .pace import Pace
from .packing import slabs
from .patch import entries
from .repacked import Repacked, RepackedModules
from .sources import DTYPES, Source
from .trace import Kept, Storages, TensorMap, kept_beside, trace
from .undo import MOST_SHARE, OldBits, Rewind

__all__ = ["LiveWeights", "NotStaged"]

_AT_ONCE = 1 << 18
"""Changes that staging maps at a time: some milliseconds, during which it holds the interpreter."""


class NotStaged(Exception):
    """The version asked for is not the one that is staged."""


class LiveWeights:
    """The part of the model that one worker process holds, in checkpoint coordinates."""

    def __init__(
        self,
        model: Any,
        tensors: Iterable[Tensor],
        replica: Source,
        fed_modules: Callable[[list[Tensor]], dict[str, tuple[set[str], list[str]]]] | None = None,
        repacked: Sequence[Repacked] = (),
    ) -> None:
        """Trace every tensor. `fed_modules`: finds the modules of tensors whose loaders refuse a probe.

        `repacked`: modules that keep their weights in another order than loaders put them in.

        Raises `ValueError`, with a sentence for the user, when the model is another one.
        """
        self._tensors = {tensor.names[0]: tensor for tensor in tensors}
        self._replica = replica
        self._storages = Storages(model)
        self._repacked = RepackedModules(self._storages, repacked)
        self._load_weights = model.load_weights
        self._maps: dict[str, TensorMap] = {}
        self._staged: tuple[str, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] | None = None
        self._staged_old: tuple[OldBits, int] | None = None
        """What the staged patch will replace, and how often live weights were written before it was staged."""
        self._writes = 0
        """How often live weights were written."""
        self.rewind = Rewind()
        self.sources: dict[str, bytes] = {}
        """By tensor: the hashes of its blocks, as they were last loaded."""
        self._kept: dict[str, list[Kept]] = {}
        """By tensor: tensors that may be derived from it, outside the storages that its loader fills."""
        self._as_loaded: dict[int | str, bytes] = {}
        """Digest after its load of each storage that loaders filled (by number) and each derived tensor (by label)."""
        refused = self._trace_all()
        if refused:
            fed = {} if fed_modules is None else fed_modules([self._tensors[name] for name in refused])
            for name, error in refused.items():
                modules, accepted = fed.get(name, (set(), []))
                if not modules:
                    raise ValueError(f"the engine's model does not take the checkpoint's {name}: {error}") from error
                self._maps[name] = TensorMap.of_modules(self._storages, modules, accepted)
        for found in self._maps.values():
            found.opaque = found.opaque or self._repacked.why(found.storages)
        self._look_beside(model)

    def check_apart(self, prefix: str) -> None:
        """Raises `ValueError` when a tensor whose name begins with `prefix` shares its storage with another one that
        does not, so that writing one would change the other."""
        others = {name: found for name, found in self._maps.items() if not name.startswith(prefix)}
        names = {number: name for name, found in others.items() for number in found.storages}
        for name, found in self._maps.items():
            shared = [names[number] for number in found.storages if number in names]
            if name.startswith(prefix) and shared:
                raise ValueError(
                    f"vLLM keeps the draft's {name[len(prefix) :]} in the memory of {shared[0]}, because they are "
                    "equal: start the swarm with a draft that leaves it out, or that has bits of its own"
                )

    def _trace_all(self) -> dict[str, Exception]:
        """Set the map of every tensor except those whose loaders refuse a probe; returns their errors."""
        refused: dict[str, Exception] = {}
        with self._repacked.as_loaded():
            for name, tensor in self._tensors.items():
                if tensor.dtype not in DTYPES:
                    raise ValueError(f"{name} is {tensor.dtype}, which torch does not know")
                dtype = DTYPES[tensor.dtype]
                try:
                    self._maps[name] = trace(self._load_weights, self._storages, tensor.names, tensor.shape, dtype)
                except Exception as error:
                    refused[name] = error
        return refused

    def _look_beside(self, model: torch.nn.Module) -> None:
        """A tensor from which something is derived outside its loader's storages is opaque."""
        filled = {number for found in self._maps.values() for number in found.storages}
        filled |= {number for number in self._repacked.idle if number is not None}
        beside = kept_beside(model, self._storages, filled)
        for name, found in self._maps.items():
            self._kept[name] = [kept for prefix in sorted(self._modules(found)) for kept in beside.get(prefix, ())]
            if self._kept[name] and not found.opaque:
                found.opaque = f"{self._kept[name][0].label} is derived from it"

    def _modules(self, found: TensorMap) -> set[str]:
        return {prefix for number in found.storages for prefix in self._storages.modules[number]}

    @property
    def covered(self) -> dict[str, int]:
        """The number of elements of each tensor that are live here; an element in two places counts twice."""
        return {name: sum(box.elements for box in found.boxes) for name, found in self._maps.items()}

    @property
    def opaque(self) -> dict[str, str]:
        """The tensors that cannot be scattered, and why."""
        return {name: found.opaque for name, found in self._maps.items() if found.opaque}

    @property
    def modules(self) -> dict[str, tuple[str, ...]]:
        """The modules that each tensor feeds."""
        return {name: tuple(sorted(self._modules(found))) for name, found in self._maps.items()}

    @property
    def device(self) -> str:
        """The kind of device that the live weights are on, as torch names it."""
        return "+".join(sorted({flat.device.type for flat in self._storages.flat}))

    # ------------------------------------------------------------ in the background

    def stage(self, patch: NDArray[np.uint8], version: str, scattered: frozenset[str]) -> None:
        """Map the patch's changes of the `scattered` tensors and copy them to the device. Replaces what was staged.

        Changes no live weight. Raises `BadPatch`.
        """
        self._staged = self._staged_old = None
        pace, writes = Pace(), self._writes
        found: dict[int, list[tuple[NDArray[np.int64], NDArray[Any]]]] = {}
        for name, indices, bits in entries(patch):
            if name not in scattered:
                continue
            step = _AT_ONCE // self._repacked.most_parts(self._maps[name].storages)
            for at in range(0, indices.size, step):
                some, new = indices[at : at + step], bits[at : at + step]
                for box in self._maps[name].boxes:
                    chosen, places = box.map(some)
                    if places.size:
                        found.setdefault(box.storage, []).append(self._to_write(box.storage, places, new[chosen]))
                pace.rest()
        patches, old = [], OldBits(int(MOST_SHARE * self._nbytes))
        for number, parts in found.items():
            patches.append(self._copy_to_device(number, parts))
            with self.rewind.reading():
                old.add(*patches[-1][:2])
            pace.rest()
        self._staged, self._staged_old = (version, patches), (old, writes)
        _synchronize(self._storages)

    def _to_write(
        self, storage: int, places: NDArray[np.int64], bits: NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """(live places, bits), of places as loaders know them; of packed codes, the bits that change (`codes`)."""
        packing = self._repacked.packings.get(storage)
        if isinstance(packing, CodePacking):
            with self.rewind.reading():
                return packing.changes(self._storages.flat[storage].numpy(), places, bits)
        return (places if packing is None else packing.live(places)), bits

    @property
    def _nbytes(self) -> int:
        return sum(flat.nbytes for flat in self._storages.flat)

    def _copy_to_device(
        self, number: int, parts: list[tuple[NDArray[np.int64], NDArray[Any]]]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(a storage, flat; places in it; new bits): the changes of storage `number`, on its device."""
        flat = self._storages.flat[number]
        places = np.concatenate([places for places, _ in parts])
        bits = np.concatenate([bits for _, bits in parts])
        parts.clear()
        if isinstance(self._repacked.packings.get(number), CodePacking):
            with self.rewind.reading():
                places, bits = CodePacking.merged(flat.numpy(), places, bits)
        values = torch.from_numpy(bits.view(f"i{bits.itemsize}"))
        return flat, torch.from_numpy(places).to(flat.device), values.to(flat.device)

    def gather(self, parts: Iterable[Part], scratch: NDArray[np.uint8]) -> None:
        """Write the live bits of each part, as far as they are here, into the scratch, in checkpoint order."""
        for _, live, place in self._pairs(parts, scratch):
            place[...] = live

    def differing(self, parts: Iterable[Part], scratch: NDArray[np.uint8]) -> list[str]:
        """The names of the parts whose live bits here differ from the scratch."""
        return sorted({name for name, live, place in self._pairs(parts, scratch) if not np.array_equal(live, place)})

    def _pairs(
        self, parts: Iterable[Part], scratch: NDArray[np.uint8]
    ) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
        """(tensor, live bits of a box, their places in the scratch), both of the same shape."""
        for part in parts:
            tensor = self._tensors[part.name]
            row = int(np.prod(tensor.shape[1:], dtype=np.int64)) or 1
            itemsize = DTYPES[tensor.dtype].itemsize
            flat = scratch[part.at : part.at + part.count * itemsize].view(f"i{itemsize}")
            for whole in self._maps[part.name].boxes:
                box = whole.rows(row, part.start, part.count)
                if box is None:
                    continue
                place = _strided(flat, box.offset - part.start, box.shape, box.strides)
                if (packing := self._repacked.packings.get(box.storage)) is None:
                    yield part.name, self._live(box), place
                    continue
                for rows, places in slabs(box):
                    yield part.name, packing.read(partial(self._at, box.storage), places), place[rows]

    def _at(self, storage: int, places: NDArray[np.int64]) -> NDArray[Any]:
        """The live bits at places of a storage, of any shape."""
        flat = self._storages.flat[storage]
        if flat.device.type == "cpu":
            return flat.numpy()[places]
        return flat[torch.from_numpy(places).to(flat.device)].cpu().numpy()

    def _live(self, box: Box) -> NDArray[Any]:
        flat = self._storages.flat[box.storage]
        if flat.device.type == "cpu":
            return _strided(flat.numpy(), box.live_offset, box.shape, box.live_strides)
        return torch.as_strided(flat, box.shape, box.live_strides, box.live_offset).cpu().numpy()

    def changed(self, names: Collection[str]) -> list[str]:
        """Those of `names` whose storages, or tensors derived from them, changed since their load."""
        differ = self._differ(names)
        return sorted(name for name in names if any(differ[place] for place in self._places(name)))

    def unmoved(self, names: Collection[str]) -> list[str]:
        """After `names` were loaded with other bits: the tensors and derived tensors that did not change."""
        differ = self._differ(names)
        stayed = {place for place, moved in differ.items() if isinstance(place, str) and not moved}
        for name in names:
            moved = [differ[place] for place in self._places(name)]
            if DTYPES[self._tensors[name].dtype].is_floating_point and moved and not any(moved):
                stayed.add(name)
        return sorted(stayed)

    def _differ(self, names: Iterable[str]) -> dict[int | str, bool]:
        """By place of these tensors: whether it differs from what `remember` saw."""
        places = {place: tensor for name in names for place, tensor in self._places(name).items()}
        return {place: _digest(tensor) != self._as_loaded.get(place) for place, tensor in places.items()}

    def _places(self, name: str) -> dict[int | str, torch.Tensor | None]:
        """Everything that loading a tensor changes: its storages by number, derived tensors by label."""
        own: dict[int | str, torch.Tensor | None] = {n: self._storages.flat[n] for n in self._maps[name].storages}
        return own | {kept.label: kept.tensor for kept in self._kept[name]}

    # ------------------------------------------------------------ between two steps

    def commit(self, version: str) -> None:
        """Write what was staged. Raises `NotStaged` before anything is written."""
        if self._staged is None or self._staged[0] != version:
            raise NotStaged(f"{version} is not what is staged ({self._staged[0] if self._staged else 'nothing'})")
        (_, patches), self._staged = self._staged, None
        (old, writes), self._staged_old = self._staged_old or (None, 0), None
        if writes != self._writes:
            raise NotStaged(f"live weights were written after {version} was staged")
        self.rewind.set(None)
        self._writes += 1
        with torch.no_grad():
            for flat, places, bits in patches:
                flat.index_copy_(0, places, bits)
        _synchronize(self._storages)
        self.rewind.set(old)

    def load(
        self, names: Iterable[str] | None, reload_weights: Callable[[Iterable[Any]], None], source: Source | None = None
    ) -> None:
        """Load tensors (None: all) whole through vLLM's own loaders, from `source` (None: the replica).

        Repacked modules are loaded without them (`repacked`). The tensors' hashes are in `sources` afterwards.
        """
        self._staged = self._staged_old = None
        self._writes += 1
        self.rewind.set(None)
        self.sources = {}
        source = source or self._replica
        wanted = list(self._maps) if names is None else list(names)
        filled = {name: self._maps[name].storages for name in wanted}
        others = [name for name in wanted if not self._repacked.holds(filled[name])]
        quiet = logging.getLogger("vllm.model_executor.model_loader.reload")
        level = quiet.level
        if len(others) < len(self._maps):
            quiet.setLevel(logging.ERROR)  # it warns of modules that get no weights
        try:
            if others:
                reload_weights(self._weights(others, source))
        finally:
            quiet.setLevel(level)
        self._repacked.load(filled, self._load_weights, lambda some: self._weights(some, source))
        _synchronize(self._storages)

    def remember(self, names: Iterable[str]) -> None:
        """Remember these tensors' storages and derived tensors as they are now, for `changed` and `unmoved`."""
        places = {place: tensor for name in names for place, tensor in self._places(name).items()}
        self._as_loaded |= {place: _digest(tensor) for place, tensor in places.items()}

    def hash(self, source: Source) -> None:
        """Put the hashes of a source's tensors into `sources`, without loading anything."""
        self.sources = {name: source.read(tensor)[1] for name, tensor in self._tensors.items()}

    def _weights(self, names: Iterable[str], source: Source) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            weight, self.sources[name] = source.read(self._tensors[name])
            for accepted in self._maps[name].accepted:
                yield accepted, weight


def _digest(tensor: torch.Tensor | None) -> bytes:
    if tensor is None:
        return b""
    return blake3(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()


def _strided(flat: NDArray[Any], offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> NDArray[Any]:
    steps = tuple(step * flat.itemsize for step in strides)
    return np.lib.stride_tricks.as_strided(flat[offset:], shape, steps)


def _synchronize(storages: Storages) -> None:
    if any(flat.device.type == "cuda" for flat in storages.flat):
        torch.cuda.synchronize()

"""A sample of a base's weights agrees with every copy of that base, and with no unrelated model."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from codec import Layout, TensorSpec
from codec.base_sample import agreement, sample_base, sample_places, sampled_layers
from codec.bits import Bits

Tensors = dict[str, NDArray[np.float32]]


def layout(dtype: str, layers: int = 20) -> Layout:
    return Layout(
        (
            TensorSpec("embed.weight", dtype, (64, 32)),
            *(TensorSpec(f"layers.{i:02}.up.weight", dtype, (48, 32)) for i in range(layers)),
            TensorSpec("layers.norm.weight", dtype, (32,)),
        )
    )


def model(seed: int, of: Layout) -> Tensors:
    random = np.random.default_rng(seed)
    return {spec.name: random.normal(0, 0.02, spec.shape).astype(np.float32) for spec in of.tensors}


def stored(tensors: Tensors, dtype: str) -> Callable[[str], Bits]:
    def bits(name: str) -> Bits:
        flat = tensors[name].reshape(-1)
        if dtype == "BF16":
            return (flat.view(np.uint32) >> 16).astype(np.uint16)
        return flat.view(np.uint32) if dtype == "F32" else flat.astype(np.float16).view(np.uint16)

    return bits


def copies(tensors: Tensors) -> Callable[[str], NDArray[np.float32] | None]:
    def values(layer: str) -> NDArray[np.float32] | None:
        flat = tensors[f"{layer}.weight"].reshape(-1)
        return flat[sample_places(flat.size)]

    return values


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_copies_of_any_dtype_agree_and_another_model_does_not(dtype: str) -> None:
    base = layout(dtype)
    own = model(1, base)
    sample = sample_base(base, stored(own, dtype))
    assert len(sample) == 2 * 16 * 64
    assert len(sampled_layers(base)) == len(set(sampled_layers(base))) == 16
    compared, agree = agreement(sample, base, copies(own))
    assert compared == 16 * 64
    assert agree > 0.98 * compared  # float16 rounds some values up to the next power of two
    trained = {name: values * np.float32(1.002) for name, values in own.items()}
    assert agreement(sample, base, copies(trained))[1] > 0.98 * compared
    for other in range(2, 6):
        assert agreement(sample, base, copies(model(other, base)))[1] < 0.25 * compared


def test_what_the_other_does_not_have_is_not_compared() -> None:
    base = layout("BF16", layers=3)
    own = model(1, base)
    sample = sample_base(base, stored(own, "BF16"))
    assert agreement(sample, base, lambda layer: None) == (0, 0)
    assert agreement(sample, base, lambda layer: np.zeros(3, np.float32)) == (0, 0)
    assert agreement(b"", base, copies(own)) == (0, 0)
    second = copies(own)
    assert agreement(sample, base, lambda layer: second(layer) if ".01." in layer else None) == (64, 64)


def test_places_are_in_the_tensor_and_differ() -> None:
    for elements in (1, 2, 63, 64, 65, 1000, 1 << 33):
        places = sample_places(elements)
        assert places.size == min(64, elements)
        assert places[0] == 0
        assert places[-1] < elements
        assert (np.diff(places) > 0).all()

"""Why a vLLM is refused: the sentence gives the reason of the tensor that it is about."""

from node.engines.vllm.compatibility import not_reloadable


def test_the_tensor_that_could_not_be_reloaded_is_named_with_its_own_reason() -> None:
    loaded = {"a.A_log": "its loader computes what it stores", "b.experts.0.w1": "it is repacked"}
    said = not_reloadable(loaded, "reloading b.experts.0.w1 does not make of it what its first load did")
    assert "b.experts.0.w1 cannot be written in place (it is repacked)" in said
    assert "A_log" not in said
    assert "a.A_log cannot be written in place (its loader computes" in not_reloadable(loaded, "a worker failed")

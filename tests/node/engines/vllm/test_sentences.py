"""The sentence for a refused vLLM names one tensor, with that tensor's own reason."""

from node.engines.vllm.compatibility import not_reloadable


def test_the_refusal_names_the_tensor_with_its_own_reason() -> None:
    loaded = {"a.A_log": "its loader computes what it stores", "b.experts.0.w1": "it is repacked"}
    sentence = not_reloadable(loaded, "reloading b.experts.0.w1 does not make of it what its first load did", "vLLM")
    assert "b.experts.0.w1 cannot be written in place (it is repacked)" in sentence
    assert "A_log" not in sentence
    assert "a.A_log cannot be written in place (its loader computes" in not_reloadable(
        loaded, "a worker failed", "vLLM"
    )

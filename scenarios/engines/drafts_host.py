"""One vLLM with a speculative decoder, for `drafts`. Runs in vLLM's Python.

    python drafts_host.py QUESTIONS.json

{"folder": ..., "speculative": {...}, "patches": [[target's, draft's], ...], "prompts": [[...]], "tokens": 64}. Prints
one JSON line: the acceptance length and the greedy tokens, before and after the patches were written into both models.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import json
import os
import statistics
import sys
import time
from typing import Any

MARK = "DRAFTS "


def _measure(llm: Any, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """(acceptance length, greedy tokens of each prompt)."""
    from vllm import SamplingParams

    def counts() -> dict[str, float]:
        return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    before = counts()
    found = [
        list(llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0].token_ids)
        for prompt in prompts
    ]
    after = counts()
    steps, accepted = (
        after.get(name, 0) - before.get(name, 0)
        for name in ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    )
    return 1 + accepted / max(1, steps), found


def _live(model: Any, folder: str) -> Any:
    """The plugin's map of a model whose weights are in `folder`."""
    from pathlib import Path

    from safetensors import safe_open
    from swarm_vllm.messages import Tensor
    from swarm_vllm.sources import DTYPES, FolderSource
    from swarm_vllm.weights import LiveWeights

    names = {dtype: name for name, dtype in DTYPES.items()}
    tensors = []
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                tensor = file.get_tensor(name)
                tensors.append(Tensor((name,), names[tensor.dtype], tuple(tensor.shape), 0))
    return LiveWeights(model, tensors, FolderSource(Path(folder), 1 << 20))


def main() -> None:
    with open(sys.argv[1]) as file:
        asked = json.load(file)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import numpy as np
    from vllm import LLM

    llm = LLM(
        model=asked["folder"], max_model_len=512, max_num_seqs=8, enforce_eager=True, enable_prefix_caching=False,
        weight_transfer_config={"backend": "swarm"}, speculative_config=asked["speculative"], disable_log_stats=False,
    )  # fmt: skip
    acceptance, tokens = _measure(llm, asked["prompts"], asked["tokens"])
    out: dict[str, Any] = {"acceptance": acceptance, "tokens": tokens}
    if asked["patches"]:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
        runner = getattr(worker, "worker", worker).model_runner
        models = [(runner.get_model(), asked["folder"]), (runner.drafter.model, asked["speculative"]["model"])]
        live = [_live(model, folder) for model, folder in models]
        storages = [{p.untyped_storage().data_ptr() for p in model.parameters()} for model, _ in models]
        out["opaque"] = {name: why for weights in live for name, why in weights.opaque.items()}
        out["shared"] = len(storages[0] & storages[1])
        pauses = []
        for number, paths in enumerate(asked["patches"]):
            for weights, path in zip(live, paths):  # noqa: B905 - Python 3.10
                names = frozenset(name for name in weights.covered if name not in weights.opaque)
                weights.stage(np.fromfile(path, np.uint8), str(number), names)
            started = time.perf_counter()
            for weights in live:
                weights.commit(str(number))
            pauses.append(time.perf_counter() - started)
        out["pause_ms"] = 1e3 * statistics.median(pauses)
        out["acceptance_after"], out["tokens_after"] = _measure(llm, asked["prompts"], asked["tokens"])
    print(MARK + json.dumps(out), flush=True)


if __name__ == "__main__":
    main()

"""Run by vLLM's Python: what a fresh engine says of each checkpoint, with nothing of ours but the kernels' choice.

    python engine_fresh.py QUESTIONS.json RANKS     {"prompts": [[...]], "tokens": 24, "folders": [...], "more": {}}

`more`: of vLLM's own arguments. One JSON line a folder: [[tokens, log-probabilities], ...], one prompt after the other.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import gc
import json
import multiprocessing
import os
import sys


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _start_ranks_soon() -> None:
    """Let each rank's process be forked off one that has imported vLLM and done nothing else: as new as one that
    imports it by itself, and ten seconds sooner."""
    from vllm.v1.executor import multiproc_executor

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3"])
    multiproc_executor.get_mp_context = lambda: context


def main() -> None:
    with open(sys.argv[1]) as file:
        questions = json.load(file)
    ranks = int(sys.argv[2])
    if ranks == 1 or not _has_gpu():
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if ranks > 1 and not _has_gpu():
        _start_ranks_soon()
    from vllm import LLM, SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=questions["tokens"], logprobs=0, ignore_eos=True)
    for folder in questions["folders"]:
        engine = LLM(
            model=folder, max_model_len=512, max_num_seqs=8, tensor_parallel_size=ranks,
            weight_transfer_config={"backend": "swarm"}, logprobs_mode="processed_logprobs",
            enable_prefix_caching=False, **({"enforce_eager": True} | questions.get("more", {})),
        )  # fmt: skip
        answers = []
        for prompt in questions["prompts"]:
            made = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0]
            logprobs = [at[token].logprob for at, token in zip(made.logprobs, made.token_ids)]  # noqa: B905
            answers.append([list(made.token_ids), logprobs])
        print("FRESH " + json.dumps(answers), flush=True)
        del engine
        gc.collect()


if __name__ == "__main__":
    main()

"""Prints the answers of a fresh vLLM for each checkpoint. Runs in vLLM's Python; only the choice of kernels is ours.

    python engine_fresh.py QUESTIONS.json RANKS     {"prompts": [[...]], "tokens": 24, "folders": [...], "more": {}}

`more`: further arguments of vLLM. `images`: for each prompt, its images in base64. `adapters`: folders of peft; each is
asked by its own engine of the only folder. Prints one JSON line per folder or adapter: [[tokens, log-probabilities],
...], one per prompt. With `prompt_logprobs`, each has a third item: of every token of the prompt but the first {token:
[log-probability, rank]}, as vLLM gives them.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import base64
import gc
import io
import json
import multiprocessing
import os
import sys
from itertools import repeat
from typing import Any


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _start_ranks_soon() -> None:
    """Fork each rank from a process that has only imported vLLM. It is as fresh as a new process and starts 10 s
    sooner."""
    from vllm.v1.executor import multiproc_executor

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3"])
    multiproc_executor.get_mp_context = lambda: context


def _seen(images: list[str]) -> dict[str, Any]:
    """What a prompt with these images has besides its tokens: Pillow's own reading of them."""
    from PIL import Image

    found = [Image.open(io.BytesIO(base64.b64decode(image))).convert("RGB") for image in images]
    return {"multi_modal_data": {"image": found}} if found else {}


def main() -> None:
    with open(sys.argv[1]) as file:
        questions = json.load(file)
    ranks = int(sys.argv[2])
    if ranks == 1 or not _has_gpu():
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if ranks > 1 and not _has_gpu():
        _start_ranks_soon()
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    adapters = questions.get("adapters", [])
    cases = [(questions["folders"][0], adapter) for adapter in adapters] or [(f, "") for f in questions["folders"]]
    scored = questions.get("prompt_logprobs")
    how = {"max_tokens": questions["tokens"], "logprobs": 0, "ignore_eos": True, "prompt_logprobs": scored}
    sampling = SamplingParams(temperature=0, **how)
    for folder, adapter in cases:
        asked = LoRARequest("fresh", 1, adapter) if adapter else None
        engine = LLM(
            model=folder, max_model_len=512, max_num_seqs=8, tensor_parallel_size=ranks,
            weight_transfer_config={"backend": "swarm"}, logprobs_mode="processed_logprobs",
            enable_prefix_caching=False, **({"enforce_eager": True} | questions.get("more", {})),
        )  # fmt: skip
        answers = []
        for prompt, images in zip(questions["prompts"], questions.get("images") or repeat([])):  # noqa: B905
            asked_for = {"prompt_token_ids": prompt} | _seen(images)
            output = engine.generate([asked_for], sampling, use_tqdm=False, lora_request=asked)
            of_prompt = output[0].prompt_logprobs
            output = output[0].outputs[0]
            logprobs = [at[token].logprob for at, token in zip(output.logprobs, output.token_ids)]  # noqa: B905
            answers.append([list(output.token_ids), logprobs])
            if scored is not None:
                rows = [{token: [one.logprob, one.rank] for token, one in at.items()} for at in of_prompt[1:]]
                answers[-1].append(rows)
        print("FRESH " + json.dumps(answers), flush=True)
        del engine
        gc.collect()


if __name__ == "__main__":
    main()

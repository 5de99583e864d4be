"""Prints the fields of vLLM's requests as JSON. Run it with the Python of vLLM's environment to make vllm_fields.json:

PYTHON tests/conformance/vllm_fields.py > tests/conformance/vllm_fields.json
"""

import json

from vllm import SamplingParams, __version__
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

found = {
    "release": __version__,
    "completions": sorted(CompletionRequest.model_fields),
    "chat": sorted(ChatCompletionRequest.model_fields),
    "generate": sorted(GenerateRequest.model_fields),
    "sampling_params": sorted(name for name in SamplingParams.__struct_fields__ if not name.startswith("_")),
}
print(json.dumps(found, indent=1))

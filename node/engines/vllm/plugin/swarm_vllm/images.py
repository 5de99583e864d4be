"""The images of a request: decoded for vLLM, and forgotten by its encoder when the weights change."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import asyncio
import io
import time
from typing import Any

from blake3 import blake3

__all__ = ["MAX_PIXELS", "forget_encoded", "prompt_of", "reads_images"]

MAX_PIXELS = 1 << 24
"""Of all images of a prompt together, as in `node.engines.images`."""
_FORMATS = ("PNG", "JPEG", "WEBP")


def reads_images(config: Any) -> bool:
    """Whether the model of this configuration of vLLM reads images."""
    return bool(config.model_config.is_multimodal_model) and hasattr(config.model_config.hf_config, "vision_config")


async def prompt_of(token_ids: list[int], images: tuple[bytes, ...]) -> dict[str, Any]:
    """vLLM's prompt. Images are decoded in a thread. Raises `ValueError` for damaged images and too large ones.

    vLLM's caches name each image by the digest of its encoded bytes, so a group's samples share one copy, and no prefix
    with one image is taken for that with another.
    """
    prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
    if images:
        found = await asyncio.get_running_loop().run_in_executor(None, _decoded, images)
        prompt["multi_modal_data"] = {"image": found}
        prompt["multi_modal_uuids"] = {"image": [blake3(image).hexdigest() for image in images]}
    return prompt


def _decoded(images: tuple[bytes, ...]) -> list[Any]:
    from PIL import Image  # here: a vLLM whose model is of text alone needs neither
    from vllm.multimodal.image import convert_image_mode, normalize_image

    found, pixels = [], 0
    for number, data in enumerate(images):
        try:
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:  # reads the header only
                pixels += image.width * image.height
                if pixels > MAX_PIXELS:
                    raise ValueError(f"the images have more than {MAX_PIXELS} pixels")
                image.load()
                found.append(convert_image_mode(normalize_image(image), "RGB"))
        except ValueError:
            raise
        except Exception as error:  # Pillow raises many kinds of errors for damaged files
            raise ValueError(f"image {number} cannot be decoded: {error}") from error
    return found


def forget_encoded(core: Any) -> None:
    """Forget what the encoder computed under the weights before. Prefixes are kept apart by salts (`core`), but the
    encoder's outputs are found by their image alone.

    A request that has read a part of an image begins again, because it still needs that image's output.
    """
    if not core.vllm_config.model_config.is_multimodal_model:
        return
    scheduler = core.scheduler
    for request in [request for request in scheduler.running if _is_amid(request)][::-1]:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    scheduler.reset_encoder_cache()
    core.model_executor.reset_encoder_cache()


def _is_amid(request: Any) -> bool:
    """Whether the request has read a part of one of its images, but not all of it."""
    places = (feature.mm_position for feature in request.mm_features)
    return any(place.offset < request.num_computed_tokens < place.offset + place.length for place in places)

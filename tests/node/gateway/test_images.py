"""Images in chat requests: to the node that draws, to the one that replaces it, and what is refused before."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from gateway_kit import LETTERS, EchoEngine, gateway, until, with_client
from image_kit import MARK, SeeingEngine, ask, image_files, part, png, shown, url_of
from openai import BadRequestError

from node.engines.base import ABILITIES, IMAGES, JUDGES
from node.engines.host import EngineFailed
from node.engines.images import MAX_IMAGES_BYTES, MAX_PIXELS
from node.ledger.fields import PART_BYTES

FEW = {"max_tokens": 8}


def text_of(*images: bytes) -> str:
    return "".join(LETTERS[letter] for letter in shown(images))


async def test_the_engine_gets_the_images_in_their_order(tmp_path: Path):
    one, two = png(shade=1), png(shade=2)
    async with gateway(tmp_path, files=image_files()) as (swarm, url):
        engine = await swarm.add(1, engine=SeeingEngine())

        async def use(client):
            for images in ((one,), (two,), (two, one)):
                answer = await client.chat.completions.create(
                    model="policy", messages=ask(*(part(url_of(image)) for image in images)), n=3, **FEW
                )
                assert [choice.message.content for choice in answer.choices] == [text_of(*images)] * 3
                assert answer.choices[0].model_extra["prompt_token_ids"].count(MARK) == len(images)

        await with_client(url, use)
        assert set(engine.seen) == {(one,), (two,), (two, one)}
        assert swarm.service.images.nbytes == 0, "nobody waits for them any more"


async def test_a_large_image_comes_in_parts_and_once_for_all_samples(tmp_path: Path):
    large = png() + bytes(2 * PART_BYTES)
    async with gateway(tmp_path, files=image_files()) as (swarm, url):
        await swarm.add(1, engine=SeeingEngine())
        sent: list[str] = []
        to_node = swarm.service._send

        async def count(node: bytes, body: bytes) -> None:
            sent.extend(["part"] if len(body) > PART_BYTES // 2 else [])
            await to_node(node, body)

        swarm.service._send = count

        async def use(client):
            answers = [
                await client.chat.completions.create(model="policy", messages=ask(part(url_of(large))), n=4, **FEW)
                for _ in range(2)
            ]
            assert {choice.message.content for answer in answers for choice in answer.choices} == {text_of(large)}

        await with_client(url, use)
        assert len(sent) == 2, "the two full parts, and none again for the second request"


async def test_a_stream_and_the_node_that_replaces_another(tmp_path: Path):
    image = png(shade=3)
    async with gateway(tmp_path, files=image_files()) as (swarm, url):
        stuck = SeeingEngine()
        began = trio.Event()

        async def hang(prompts, *_: Any, **__: Any) -> Any:
            assert prompts[0].images == (image,)
            began.set()
            await trio.sleep_forever()

        stuck.generate = hang
        await swarm.add(1, engine=stuck)

        async def use(client):
            stream = await client.chat.completions.create(
                model="policy", messages=ask(part(url_of(image))), stream=True, **FEW
            )
            return "".join([event.choices[0].delta.content or "" async for event in stream])

        found: list[str] = []

        async def follow() -> None:
            found.append(await with_client(url, use))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            with trio.fail_after(10):
                await began.wait()
            await swarm.add(2, engine=SeeingEngine())
            swarm.kill(1)
        assert found == [text_of(image)]


async def test_nodes_that_read_no_images_get_none(tmp_path: Path):
    async with gateway(tmp_path, files=image_files()) as (swarm, url):
        blind = EchoEngine(0.01)
        blind.abilities = ABILITIES - {JUDGES, IMAGES}
        await swarm.add(1, engine=blind)

        async def refused(client):
            with pytest.raises(BadRequestError, match="no engine here reads images") as caught:
                await client.chat.completions.create(model="policy", messages=ask(part(url_of(png()))), **FEW)
            assert caught.value.param == "messages"

        await with_client(url, refused)
        seeing = await swarm.add(2, engine=SeeingEngine())

        async def use(client):
            for shade in range(6):
                image = png(shade=shade)
                answer = await client.chat.completions.create(model="policy", messages=ask(part(url_of(image))), **FEW)
                assert answer.choices[0].message.content == text_of(image)

        await until(lambda: swarm.service.abilities.able(frozenset({IMAGES})))
        await with_client(url, use)
        assert len(seeing.seen) == 6
        assert not blind.drawn


async def test_a_node_that_says_it_reads_images_and_does_not(tmp_path: Path):
    async with gateway(tmp_path, files=image_files()) as (swarm, url):
        liar = SeeingEngine()

        async def fail(*_: Any, **__: Any) -> Any:
            raise EngineFailed("this vLLM cannot read images", poisoned=False)

        liar.generate = fail
        await swarm.add(1, engine=liar)
        await swarm.add(2, engine=SeeingEngine())
        blind = EchoEngine(0.01)
        blind.abilities = ABILITIES - {JUDGES, IMAGES}
        await swarm.add(3, engine=blind)

        async def use(client):
            for shade in range(4):
                image = png(shade=shade)
                answer = await client.chat.completions.create(model="policy", messages=ask(part(url_of(image))), **FEW)
                assert answer.choices[0].message.content == text_of(image)

        await with_client(url, use)
        swarm.kill(2)

        async def alone(client):
            with pytest.raises(BadRequestError, match="cannot read images"):
                await client.chat.completions.create(model="policy", messages=ask(part(url_of(png()))), **FEW)

        await with_client(url, alone)


def _bad(url: Any, **more: Any) -> dict[str, Any]:
    return part(url) | more


LARGE = png() + bytes(MAX_IMAGES_BYTES)
SIDE = int(MAX_PIXELS**0.5)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([part("http://169.254.169.254/x.png")], "no address is fetched"),
        ([part("HTTPS://example.com/x.png")], "no address is fetched"),
        ([part("file:///etc/passwd")], "only PNG, JPEG and WebP in base64"),
        ([part(url_of(b"GIF89a" + bytes(20), "gif"))], "only PNG, JPEG and WebP in base64"),
        ([part("data:image/png," + "a" * 30)], "only PNG, JPEG and WebP in base64"),
        ([part("data:image/png;base64,")], "neither PNG, JPEG nor WebP"),
        ([part("data:image/png;base64,%%%%")], "no base64"),
        ([part("data:image/png;base64,iVBORw0KGgo=\n")], "no base64"),
        ([part(url_of(png(), "jpeg"))], "its URL says jpeg, and its data is png"),
        ([part(url_of(png()[:20]))], "PNG header is damaged"),
        ([part(url_of(b"\xff\xd8\xff\xe0\0\x10JFIF", "jpeg"))], "header is cut off"),
        ([part(url_of(png(SIDE + 1, SIDE)))], "16,781,312 pixels together"),
        ([part(url_of(png(1 << 30, 1 << 30)))], "a side has 1 to 16,384"),
        ([part(url_of(png(0, 7)))], "a side has 1 to 16,384"),
        ([part(url_of(png(SIDE, SIDE))), part(url_of(png()))], "pixels together"),
        ([part(url_of(png(shade=i))) for i in range(9)], "at most 8 images"),
        ([part(7)], "is a text"),
        ([part(None)], "is a text"),
        ([{"type": "image_url"}], "an image is"),
        ([{"type": "image_url", "image_url": url_of(png())}], "an image is"),
        ([{"type": "image_url", "image_url": {"url": url_of(png()), "more": 1}}], "an image is"),
        ([_bad(url_of(png()), uuid="x")], "an image is"),
        ([{"type": "image_url", "image_url": {"url": url_of(png()), "detail": "most"}}], "detail is auto"),
        ([part(url_of(png())), {"type": "text", "text": "<image>"}], "2 places for 1 images"),
        ([part(url_of(png())), {"type": "input_audio"}], "'input_audio': only parts of the type text"),
    ],
    ids=lambda found: found if isinstance(found, str) else "",
)
async def test_what_is_refused(tmp_path: Path, parts: list[Any], why: str):
    async with gateway(tmp_path, files=image_files()) as (swarm, url):
        engine = await swarm.add(1, engine=SeeingEngine())

        async def use(client):
            with pytest.raises(BadRequestError, match=why) as caught:
                await client.chat.completions.create(model="policy", messages=ask(*parts), **FEW)
            assert caught.value.param.startswith("messages")

        await with_client(url, use)
        assert not engine.seen


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"return_routed_experts": True}, "return_routed_experts"),
    ],
)
async def test_fields_that_count_the_prompts_tokens(tmp_path: Path, more: dict[str, Any], param: str):
    async with gateway(tmp_path, files=image_files()) as (swarm, url):
        await swarm.add(1, engine=SeeingEngine())

        async def use(client):
            with pytest.raises(BadRequestError, match="not with images") as caught:
                await client.chat.completions.create(
                    model="policy", messages=ask(part(url_of(png()))), extra_body=more, **FEW
                )
            assert caught.value.param == param

        await with_client(url, use)


async def test_models_and_gateways_without_images(tmp_path: Path):
    files = image_files()
    config = msgspec.json.decode(files["config.json"])
    del config["vision_config"]
    blind = files | {"config.json": msgspec.json.encode(config)}
    for number, (of, most, why) in enumerate(((blind, 8, "reads text alone"), (files, 0, "takes no images"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with gateway(folder, files=of, images=most) as (swarm, url):
            await swarm.add(1, engine=SeeingEngine())

            async def use(client, why=why):
                with pytest.raises(BadRequestError, match=why):
                    await client.chat.completions.create(model="policy", messages=ask(part(url_of(png()))), **FEW)

            await with_client(url, use)

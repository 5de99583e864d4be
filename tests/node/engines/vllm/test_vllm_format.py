"""A node of real processes that holds int4 codes and generates with vLLM (`join --engine vllm --format`)."""

from pathlib import Path

import numpy as np
import pytest
from memory_kit import dequantised_root, generates, prove, step

from codec import Checkpoint, state_root, write_checkpoint
from codec.bits import Bits
from codec.formats.packed import PackedBase
from codec.formats.quantise import bf16_of, dequantise, quantise
from codec.formats.spec import FORMATS, FormatTensor, format_tensors, is_quantised, is_token_table
from codec.parts import extended
from codec.staging import block_hash
from scenarios.engines.engine_bench import SMALL
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, swarm_in

pytestmark = pytest.mark.vllm

FORM = FORMATS["int4-group-e8"]


def larger(before: Path, after: Path) -> Path:
    """A version whose codes and scales change: one row of each quantised matrix is twice as large."""
    checkpoint = Checkpoint.open(before)

    def bits(name: str) -> Bits:
        changed, spec = checkpoint.bits(name).copy(), checkpoint.layout.tensor(name)
        if is_quantised(spec, FORM):
            row = changed[: FormatTensor(FORM, spec).matrix.columns]
            row[row & 0x7F80 != 0] += 0x80
        return changed

    write_checkpoint(after, checkpoint.layout, bits, checkpoint.files)
    return after


def packed_root(folder: Path) -> str:
    """The root of the checkpoint of packed codes, tensor by tensor. Each is of one block."""
    checkpoint = Checkpoint.open(folder)
    whole = extended(checkpoint.layout, formats=format_tensors(checkpoint.layout, FORM))
    layout = PackedBase(whole, FORM, checkpoint.files["config.json"]).layout
    blocks: dict[str, Bits] = {}
    for spec in checkpoint.layout.tensors:
        bits = checkpoint.bits(spec.name)
        if not is_quantised(spec, FORM):
            blocks[spec.name] = bits
            continue
        tensor = FormatTensor(FORM, spec)
        band = quantise(bits, tensor.matrix, tensor.form)
        if is_token_table(spec):
            blocks[spec.name] = bf16_of(dequantise(band, tensor.matrix, tensor.form))
            continue
        blocks[f"{spec.name}_packed"] = band.codes
        blocks[f"{spec.name}_scale"] = band.scales.astype(np.uint16) << np.uint16(7)
    assert layout.n_blocks == len(blocks)
    hashes = b"".join(block_hash(blocks[spec.name]) for spec in layout.tensors)
    return state_root(layout.hash, np.frombuffer(hashes, np.uint8).reshape(-1, 32)).hex()


@pytest.mark.parametrize("holds", [pytest.param("bf16", marks=pytest.mark.long), "format"])
def test_a_vllm_has_exactly_what_the_codes_stand_for(tied: Path, python: Path, tmp_path: Path, holds: str) -> None:
    folders = [tied, step(tied, tmp_path / "step_1", 1)]
    folders.append(larger(folders[-1], tmp_path / "step_2"))
    folders.append(step(folders[-1], tmp_path / "step_3", 3))
    roots = [dequantised_root(folder, FORM) if holds == "bf16" else packed_root(folder) for folder in folders]
    assert roots[1] != roots[2]
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(tied, "--format", FORM.name)
        vllm = ("--engine", "vllm", "--engine-port", "0", "--vllm-python", str(python), "--threads", "1")
        format_ = ("--format", FORM.name, "--engine-holds", holds)
        flags = tuple(f"--vllm-arg={flag}" for flag in SMALL)
        swarm.start("int4", "join", swarm.ticket(), *vllm, *flags, *LOOPBACK, *format_)
        swarm.until("int4", generates(0), 2 * STARTED_WITHIN_S)
        for number, folder in enumerate(folders):
            if number:
                swarm.publish(folder, "--wait")
            swarm.until("int4", generates(number))
            assert prove(swarm, "int4") == roots[number], number
        assert swarm.own_status("int4").engine_reloads == 0  # each version came as changes
        lines = (swarm.home("int4") / "engine.log").read_text().splitlines()
        assert ["loaded={}" in line for line in lines if " classed " in line] == [True]  # and was written in place

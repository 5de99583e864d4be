"""A node of real processes that holds int4 codes and generates with vLLM (`join --engine vllm --format`)."""

from pathlib import Path

import pytest
from memory_kit import dequantised_root, generates, prove, step

from codec import Checkpoint, write_checkpoint
from codec.bits import Bits
from codec.formats.spec import FORMATS, FormatTensor, is_quantised
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


def test_a_vllm_has_exactly_what_the_codes_stand_for(tied: Path, python: Path, tmp_path: Path) -> None:
    folders = [tied, step(tied, tmp_path / "step_1", 1)]
    folders.append(larger(folders[-1], tmp_path / "step_2"))
    folders.append(step(folders[-1], tmp_path / "step_3", 3))
    roots = [dequantised_root(folder, FORM) for folder in folders]
    assert roots[1] != roots[2]
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(tied, "--format", FORM.name)
        vllm = ("--engine", "vllm", "--engine-port", "0", "--vllm-python", str(python), "--threads", "1")
        flags = tuple(f"--vllm-arg={flag}" for flag in SMALL)
        swarm.start("int4", "join", swarm.ticket(), *vllm, *flags, *LOOPBACK, "--format", FORM.name)
        swarm.until("int4", generates(0), STARTED_WITHIN_S)
        for number, folder in enumerate(folders):
            if number:
                swarm.publish(folder, "--wait")
            swarm.until("int4", generates(number))
            assert prove(swarm, "int4") == roots[number], number
        assert swarm.own_status("int4").engine_reloads == 0  # each version came as changes

"""The settings that have one of a few values."""

from typing import Literal

__all__ = ["CoderName", "DemoEngine", "EngineHolds", "EngineName", "LogLevel", "ModelName", "Preset", "Running"]

Preset = Literal["wan", "lan", "loopback"]
CoderName = Literal["auto", "rice", "pco"]
EngineName = Literal["none", "transformers", "vllm", "sglang"]
DemoEngine = Literal["transformers", "vllm"]
Running = Literal["continue", "recompute", "drain"]
EngineHolds = Literal["bf16", "format"]
ModelName = Literal["tiny", "small", "smollm2"]
LogLevel = Literal["debug", "info", "warning", "error"]

"""Lets this folder's tests share `rewards_kit`, whose model and functions are fixtures here."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers")
    from rewards_kit import make_model

    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rewards_kit import FUNCTIONS

    file = tmp_path_factory.mktemp("functions") / "functions.py"
    file.write_text(FUNCTIONS)
    return file

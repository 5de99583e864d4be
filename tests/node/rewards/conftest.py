"""A model's folder and a file of functions, from `rewards_kit`."""

from pathlib import Path

import pytest
from rewards_kit import FUNCTIONS, make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers")
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("functions") / "functions.py"
    file.write_text(FUNCTIONS)
    return file

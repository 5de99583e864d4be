"""Copies the new files under `pages/` to where they belong: `pages/docs/glossary.md` becomes `docs/glossary.md`."""

import shutil
from pathlib import Path

PAGES = Path(__file__).parent / "pages"


def copy() -> None:
    for page in sorted(PAGES.rglob("*")):
        if page.is_file():
            target = page.relative_to(PAGES)
            target = target.with_suffix("") if target.suffix == ".in" else target
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page, target)

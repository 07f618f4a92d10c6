"""Entry point of ``python -m tests.features``; see the package."""

from tests.features.table import PAGE, page

PAGE.write_text(page())

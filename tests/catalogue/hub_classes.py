"""Access to transformers' own classes where vLLM has registered others in their place."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.models.auto.configuration_auto import CONFIG_MAPPING


@contextmanager
def of_transformers() -> Iterator[None]:
    """Context in which model types map to transformers' config classes, not to vLLM's."""
    registered = CONFIG_MAPPING._extra_content
    theirs = dict(registered)
    registered.clear()
    try:
        yield
    finally:
        registered.update(theirs)

"""Classes of transformers' own, whatever vLLM has registered in their place."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.models.auto.configuration_auto import CONFIG_MAPPING


@contextmanager
def of_transformers() -> Iterator[None]:
    """Context in which a model's config is of transformers' class, not of vLLM's for the same."""
    registered = CONFIG_MAPPING._extra_content
    theirs = dict(registered)
    registered.clear()
    try:
        yield
    finally:
        registered.update(theirs)

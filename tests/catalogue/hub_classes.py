"""Transformers' own classes, whatever vLLM has registered in their place."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.models.auto.configuration_auto import CONFIG_MAPPING


@contextmanager
def of_transformers() -> Iterator[None]:
    """Context in which a model type has transformers' config class, not vLLM's own class."""
    registered = CONFIG_MAPPING._extra_content
    theirs = dict(registered)
    registered.clear()
    try:
        yield
    finally:
        registered.update(theirs)

"""Readers of a config's fields, whose errors name the field with a wrong type."""

from collections.abc import Mapping
from typing import Any

from vllm_fp4_plugin.formats.format import UnsupportedCheckpoint


def read_names(field: str, value: Any) -> tuple[str, ...]:
    """Read a list of module names or patterns; ``()`` if the field is absent.

    Args:
        field: name of the field.
        value: value of the field.

    Raises:
        UnsupportedCheckpoint: the value is not a list of strings.
    """
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise UnsupportedCheckpoint(
            f"{field}: is {value!r}, must be a list of module names and patterns; write it as one"
        )
    for position, name in enumerate(value):
        if not isinstance(name, str) or not name:
            raise UnsupportedCheckpoint(
                f"{field}[{position}]: is {name!r}, must be the name of a module or a pattern; "
                "write it in quotes, or take it out"
            )
    return tuple(value)


def read_object(field: str, value: Any) -> Mapping[str, Any]:
    """Read an object; ``{}`` if the field is absent.

    Raises:
        UnsupportedCheckpoint: the value has another type.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UnsupportedCheckpoint(
            f"{field}: is {value!r}, must be an object; export the checkpoint again"
        )
    return value


def read_objects(field: str, value: Any) -> dict[str, Mapping[str, Any]]:
    """Read an object of objects; ``{}`` if the field is absent.

    Raises:
        UnsupportedCheckpoint: the value, or a value in it, has another type.
    """
    return {
        name: read_object(f"{field}.{name}", part)
        for name, part in read_object(field, value).items()
    }


def read_text(field: str, value: Any) -> str:
    """Read a string; ``""`` if the field is absent.

    Raises:
        UnsupportedCheckpoint: the value has another type.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UnsupportedCheckpoint(
            f"{field}: is {value!r}, must be a string; export the checkpoint again"
        )
    return value

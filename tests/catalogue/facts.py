"""Facts of all families.

The checkpoints come from the recipes of the vLLM project (August 2026), followed by other popular
checkpoints. The layers in 16 bits are those that a checkpoint's config lists.
"""

from tests.catalogue.dense import DENSE
from tests.catalogue.drafts import DRAFTS
from tests.catalogue.experts import MIXTURES
from tests.catalogue.family import Family
from tests.catalogue.recent import RECENT

FAMILIES = (*DENSE, *MIXTURES, *RECENT, *DRAFTS)


def named(name: str) -> Family:
    """Family with the name ``name``.

    Raises:
        LookupError: no family has this name.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    raise LookupError(f"{name!r} is no family of the catalogue")

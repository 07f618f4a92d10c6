"""Facts of all families.

Checkpoints are those of the recipes of the vLLM project (August 2026) and, after them, others that
people name. What a checkpoint leaves in 16 bits is what its config lists.
"""

from tests.catalogue.dense import DENSE
from tests.catalogue.drafts import DRAFTS
from tests.catalogue.experts import MIXTURES
from tests.catalogue.family import Family
from tests.catalogue.recent import RECENT

FAMILIES = (*DENSE, *MIXTURES, *RECENT, *DRAFTS)


def named(name: str) -> Family:
    """Family of that name.

    Raises:
        LookupError: there is none.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    raise LookupError(f"{name!r} is no family of the catalogue")

"""What an error of a model's loader says of the checkpoint: which tensor it is, and why."""

from dataclasses import dataclass
from traceback import walk_tb
from typing import Self

from torch import Tensor

from vllm_fp4_plugin.arrivals import Arrivals, Source

_UNKNOWN = ("no module or parameter named", "has no parameter")
_PLACES = ("param_data", "param", "self")  # of a tensor, in functions that load one


@dataclass(frozen=True)
class Misfit:
    """Tensor of a checkpoint that a model's loader has failed on.

    Attributes:
        source: the tensor.
        must: shape that the loader has place for; None: that is not what it failed on.
        error: what it raised.
    """

    source: Source
    must: tuple[int, ...] | None
    error: BaseException

    @classmethod
    def found(cls, error: BaseException, arrivals: Arrivals) -> Self | None:
        """Find the tensor that a loader was at; None: it was at none.

        A model may gather tensors before it loads any: the innermost function knows.
        """
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        for frame in reversed(frames):
            values = dict(frame.f_locals)
            tensors = {n: v for n, v in values.items() if isinstance(v, Tensor)}
            for given in tensors.values():
                source = arrivals.seen_by(given)
                if source is not None:
                    place = next((tensors[name] for name in _PLACES if name in tensors), None)
                    differs = place is not None and place.shape != given.shape
                    must = tuple(place.shape) if place is not None and differs else None
                    return cls(source, must, error)
        return None if arrivals.last is None else cls(arrivals.last, None, error)

    def __str__(self) -> str:
        name, where = self.source.name, self.source.file
        if isinstance(self.error, KeyError) or any(said in str(self.error) for said in _UNKNOWN):
            return (
                f"{where}: holds {name}, for which the model has no parameter; if it belongs to "
                "a quantised layer, no ignore pattern of the config may cover that, otherwise "
                "remove it or serve the model that it was made for"
            )
        reason = str(self.error).partition("\n")[0] or type(self.error).__name__
        if self.must is not None:
            reason = f"shape is {self.source.shape}, must be {self.must}"
        return (
            f"{where}: holds {name}, which does not fit the model ({reason}); mend the model's "
            "config.json, or export the model again"
        )

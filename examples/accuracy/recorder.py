"""Writing the logits of a prompt to a file, from within a vLLM worker."""

from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


class LogitsRecorder:
    """Worker extension for vLLM that keeps the logits of the model's head, to be written later."""

    # The worker's own:
    model_runner: Any
    parallel_config: Any
    rank: int

    recorded_logits: list[Tensor] | None
    recording_model: Any = None

    def record_logits(self) -> None:
        """Keep a copy of all logits from now on."""
        self.recorded_logits = []
        model = self.model_runner.model
        if self.recording_model is model:
            return
        self.recording_model = model
        compute = model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Tensor | None:
            logits = compute(*args, **kwargs)
            # Only some ranks have the logits.
            if logits is not None and self.recorded_logits is not None:
                # Later steps may change the logits in place.
                self.recorded_logits.append(logits.detach().to("cpu", copy=True))
            return logits

        model.compute_logits = compute_logits

    def stop_recording_logits(self) -> None:
        """Stop keeping logits."""
        self.recorded_logits = None

    def write_logits(self, file: str, rows: int) -> list[int]:
        """Write the kept logits of one prompt to a file, and clear the record.

        Nothing is written unless the kept calls of more than one row have ``rows`` or ``rows + 1``
        rows in all.

        Args:
            file: safetensors file to write; ``logits`` ``(rows, vocabulary)`` as the model gave
                them.
            rows: number of prompt tokens after the first.

        Returns:
            Number of rows of each call of the head; empty on all ranks but the first of each
            tensor-parallel group.
        """
        kept = self.recorded_logits or []
        lengths = [len(logits) for logits in kept]
        # With tensor parallelism every rank may have the full logits.
        if not kept or self.rank % self.parallel_config.tensor_parallel_size:
            kept.clear()
            return []
        # The head also computes the last token's logits, from which the next token is drawn: in a
        # separate call, or as the prompt's last row.
        prompt = torch.cat([kept[0][:0], *(logits for logits in kept if len(logits) > 1)])
        kept.clear()
        if len(prompt) in (rows, rows + 1):
            save_file({"logits": prompt[:rows].contiguous()}, file)
        return lengths

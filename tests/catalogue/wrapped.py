"""Files that hub checkpoints add around a text model and that transformers does not write."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def around_text(model_type: str, **fields: Any) -> Callable[[Path], None]:
    """Make the function that turns a text model's ``config.json`` into the whole model's.

    Args:
        model_type: type of the whole model's config, for which vLLM has a class.
        fields: further fields of the config.
    """

    def surround(directory: Path) -> None:
        file = directory / "config.json"
        text = json.loads(file.read_text())
        whole = {name: text.pop(name) for name in ("architectures", "quantization_config")}
        config = whole | {"model_type": model_type, "text_config": text, **fields}
        file.write_text(json.dumps(config, indent=2))

    return surround


def mean_pooling(directory: Path) -> None:
    """Declare mean pooling over tokens, in the files that sentence-transformers reads."""
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(modules.items())
    ]
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 128, "pooling_mode_mean_tokens": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))

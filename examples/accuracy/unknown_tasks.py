"""``python -m examples.accuracy.unknown_tasks FOLDER TASK...``: names unknown to the harness.

FOLDER holds additional task definitions; pass an empty string for none. The last line of the output
is a JSON list of the unknown names.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path


def unknown_tasks(folder: str, tasks: Sequence[str]) -> list[str]:
    """Names that are neither a task, group or tag of the harness or of ``folder``, nor a file."""
    from lm_eval.tasks import TaskManager

    known = set(TaskManager(include_path=folder or None).all_tasks)
    return [task for task in tasks if task not in known and not Path(task).is_file()]


if __name__ == "__main__":
    print(json.dumps(unknown_tasks(sys.argv[1], sys.argv[2:])))

"""Process in which test_mutations.py runs a sample of the GEMM's mutants."""

import json
import sys
from itertools import islice

from tests.emulator.mutate import first_catch
from tests.emulator.mutations import mutations
from tests.test_emulator.kernels.subjects import gemm_subject


def main(step: int) -> None:
    """Print [line, instruction, change, outcome, reason] as JSON for every ``step``-th mutant."""
    subject = gemm_subject(two_sm=False)
    for mutation in islice(mutations(subject.text), 0, None, step):
        caught = first_catch(subject, mutation)
        reason = subject.reason(mutation)
        what = [mutation.line, mutation.instruction, mutation.change, caught, reason]
        print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

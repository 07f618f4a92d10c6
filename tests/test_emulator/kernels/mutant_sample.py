"""Process in which test_mutants.py runs a sample of the GEMM's mutants."""

import json
import sys
from itertools import islice

from tests.emulator.mutants import mutants
from tests.emulator.mutate import first_catch
from tests.test_emulator.kernels.subjects import gemm_subject


def main(step: int) -> None:
    """Print [line, instruction, change, outcome, reason] as JSON for every ``step``-th mutant."""
    subject = gemm_subject(two_sm=False)
    for mutant in islice(mutants(subject.text), 0, None, step):
        caught = first_catch(subject, mutant)
        reason = subject.reason(mutant)
        what = [mutant.on.line, mutant.on.instruction, mutant.on.how, caught, reason]
        print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))

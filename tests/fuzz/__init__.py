"""Fuzzer of the public ops: random valid and invalid calls, judged by float64 formulas.

::

    python -m tests.fuzz --seeds 10000                     # references, about 100 seeds a second
    python -m tests.fuzz --first 1234 --seeds 1            # one seed again
    python -m tests.fuzz --op gemm --op gemv --minutes 5   # some ops, with a time limit
    python -m tests.fuzz --emulated --seeds 300            # sm_100 kernels, about 2 seeds a second

A seed chooses an op, and draws its arguments from the op's documented domain: shapes, strides
(views of wider tensors, odd strides where a size is 1), dtypes, layouts, numbers of terms, scales
up to the ends of float32, NaN where the docs state the result, expert ids of no rank, pages in any
order with NaN where no key is. The formula must explain the result: to the bit where the op's
documentation promises exact bits, else within the bounds of its roundings (``bounds``). Formulas
are in float64 and see the arguments alone. Three parts are shared with the references: the layout
of scales and fragments, ``Activation``, and ``moe_route`` for the routing passed to products.
Attention that rotates, stores and quantises is compared with the sequence of ops that it fuses.

In four of ten seeds one argument is then broken: another dtype, rank or length, a stride, a
misaligned start, an odd element, a number out of range, None, text. The op must refuse the call
with an ``InvalidArgument`` (or torch with its signature's error) that names the argument, or
another argument that no longer fits, or else return the formula's result. Any other exception is a
finding.

``--emulated`` draws small calls, and runs the op's sm_100 kernel in the emulator, in a schedule
that the seed decides; a kernel may refuse calls beyond its documented limits. For attention the
required refusals are known: the op must refuse exactly these calls, by name. Attention's draws are
products of every head size, 16-bit or FP8 keys, a result in 16 bits or NVFP4, keys split over warps
or CTAs, and numbers of rows around the capacity of either split.

A finding is a line that begins with the command that repeats it; the exit status is then 1. The
draws of a seed depend on the seed and the op alone; with ``--op`` the op depends on the list too.
The table at the end counts, for each op: results compared; wrong arguments refused by name;
``refused by another``, whose message begins with an argument that no longer fits the broken
argument; and ``shapes alone``: a tensor on the meta device, for which torch asks an op for shapes
only.

Not judged: results of a sequence with NaN among its keys, which attention leaves undefined.

    draw.py ops.py describe.py     draws of a seed, interface of an op, arguments in a line
    bounds.py                      bounds of roundings; NVFP4 between two values
    rows.py products.py experts.py routers.py attention.py caches.py indexer.py      the ops
    attention_draw.py              draws for attention and the ops of a cache
    wrong.py run.py                one argument broken; seeds, verdicts, table
"""
